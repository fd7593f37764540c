"""Multi-hop questions: the world that is made, MuSiQue's files, grading, and what the warm start is shown."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from tests.examples.loading import load_example
from tests.examples.training import save_llama, steps_of, train
from tests.frameworks.world import ROOT, bin_of

hop = load_example("multi_hop_rag", "tasks", "grading", "demonstrations")


def named() -> list[str]:
    return [entity for kind in hop.tasks.entities() for entity in kind]


EVERY = [task for heldout in (False, True) for task in hop.tasks.all_tasks(heldout=heldout)]


# --- the world ---


def test_no_passage_has_both_what_a_question_names_and_its_answer() -> None:
    texts = [text.replace(":", "").split() for text in hop.tasks.passages()]
    mentions = {entity: [text for text in texts if entity.split()[1] in text] for entity in named()}
    assert len(EVERY) == 5184
    for task in EVERY:
        assert not any(task["answers"][0] in text for text in mentions[task["entity"]])


def test_numbers_of_hops_take_turns_and_no_heldout_question_begins_with_a_trained_fact() -> None:
    trained, heldout = hop.tasks.train_tasks(3000, 1), hop.tasks.heldout_tasks(300)
    assert Counter(task["kind"] for task in heldout) == dict.fromkeys(("2 hops", "3 hops", "4 hops"), 100)
    first_facts = [{(task["entity"], task["relations"][0]) for task in tasks} for tasks in (trained, heldout)]
    assert not first_facts[0] & first_facts[1]
    assert trained == hop.tasks.train_tasks(3000, 1) != hop.tasks.train_tasks(3000, 2)


# --- MuSiQue ---


QUESTION = "Where does the maker of Steel Rain live?"


def musique_line(**changes: object) -> str:
    paragraphs = [
        {"idx": 0, "title": "Steel Rain", "paragraph_text": "It was made by Ana Wirth.", "is_supporting": True},
        {"idx": 1, "title": "Ana Wirth", "paragraph_text": "She lives in Graz.", "is_supporting": True},
        {"idx": 2, "title": "Graz", "paragraph_text": "A town.", "is_supporting": False},
    ]
    entry = {"id": "2hop__1_2", "paragraphs": paragraphs, "question_decomposition": [], "answerable": True}
    entry |= {"question": QUESTION, "answer": "Graz", "answer_aliases": ["City of Graz"]}
    return json.dumps({**entry, **changes}) + "\n"


def test_musique_is_read_as_it_ships(tmp_path: Path) -> None:
    lines = musique_line() + musique_line(id="2hop__3_4") + musique_line(id="unanswerable", answerable=False)
    (tmp_path / "musique_ans_v1.0_dev.jsonl").write_text(lines)
    tasks, passages = hop.tasks.load_musique(tmp_path, "dev")
    answers = ["Graz", "City of Graz"]
    assert tasks[0] == {"id": "2hop__1_2", "kind": "2 hops", "question": QUESTION, "answers": answers}
    assert [task["id"] for task in tasks] == ["2hop__1_2", "2hop__3_4"]
    assert passages == ["Steel Rain: It was made by Ana Wirth.", "Ana Wirth: She lives in Graz.", "Graz: A town."]


# --- grading ---


@pytest.mark.parametrize(
    ("text", "answers", "reward"),
    [
        ("answer: Graz", ["Graz"], 1.0),
        ("Answer: the GRAZ!", ["Graz"], 1.0),
        ("answer: Linz", ["Graz"], 0.1),
        ("answer (Graz): Linz", ["Graz"], 0.1),  # what it is does not count
        ("answer: York", ["New York"], 0.9 * 2 / 3 + 0.1),  # precision 1, recall 1/2: F1 2/3
        ("answer: New York City", ["New York"], 0.9 * 2 / 3 + 0.1),  # longer than right: precision, not F1
    ],
)
def test_answers_worked_by_hand(text: str, answers: list[str], reward: float) -> None:
    assert hop.grading.grade(text, answers) == pytest.approx(reward)


@pytest.mark.parametrize(
    "text",
    [
        "The answer: Graz",  # the line does not begin with the mark
        "answer:",
        "answer: ?!",
        "answer: Graz\nThat is all.",
        "answer: Linz answer (town): Graz",
        "answer: " + "Graz " * 31,
    ],
)
def test_without_the_form_nothing_is_earned(text: str) -> None:
    assert hop.grading.grade(text, ["Graz"]) == 0.0


def test_a_list_of_candidates_earns_no_more_than_its_likeliest_alone() -> None:
    candidates = ["Graz", "Linz", "Wels", "Steyr", "Enns"]
    for n in range(2, 6):
        listed = "answer: " + ", ".join(candidates[:n])
        expected = mean(hop.grading.grade(listed, [right]) for right in candidates[:n])
        alone = mean(hop.grading.grade("answer: Graz", [right]) for right in candidates[:n])
        assert expected <= alone + 1e-9
    assert hop.grading.grade("answer: Graz Graz Graz Graz", ["Graz"]) < 0.4  # said four times is a list too


# --- demonstrations ---


def look_up(query: str) -> str:
    """What a search finds, near enough: the fact, or else any of the entity's."""
    entity, _, relation = query.rpartition(" ")
    facts = {fact: value for fact, value in hop.tasks.facts().items() if entity in (fact[0], value)}
    found = (entity, relation) if (entity, relation) in facts else next(iter(facts))
    return f"{found[0]} {found[1]}: {facts[found]}"


def test_demonstrations_are_mediocre_but_solve_every_kind_now_and_then() -> None:
    shown = hop.demonstrations.demonstrations(600, 1, look_up)
    solved = {kind: mean(one["reward"] == 1.0 for one in shown if one["kind"] == kind) for kind in hop.tasks.KINDS}
    assert 0 < solved["4 hops"] < solved["3 hops"] < solved["2 hops"] < 0.6
    assert all(one["reward"] in (0.0, 0.1, 1.0) for one in shown)


def test_what_is_written_has_been_read_before() -> None:
    for one in hop.demonstrations.demonstrations(100, 1, look_up):
        read = ""
        for message in one["messages"]:
            if message["role"] != "assistant":
                read += message["content"] + " "
                continue
            for call in message.get("tool_calls", []):
                assert all(word in read for word in json.loads(call["function"]["arguments"])["query"].split())
            if message["content"]:
                kind, _, name = message["content"].removeprefix("answer (").partition("): ")
                assert f"{kind} {name}" in read


# --- in the environment of its framework ---


@pytest.mark.slow
def test_retriever_server_and_agent_hold_in_their_own_environment() -> None:
    python = bin_of("experiments") / "python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/examples/test_multi_hop_rag_search.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_model_from_a_folder_is_trained_on_musique(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"musique_ans_v1.0_{split}.jsonl").write_text(musique_line() + musique_line(id="2hop__3_4"))
    model = save_llama(tmp_path / "llama", [QUESTION, "answer (town): Graz"])
    options = ("--musique", tmp_path, "--model", model, "--set", "dtype=float32")
    done = train("multi_hop_rag", "--out", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    (step,) = steps_of(tmp_path / "run")
    assert (step["rollouts"], step["unrewarded"]) == (4, 0)
    assert list((tmp_path / "run" / "checkpoints").glob("*/adapter_config.json"))
