"""Multi-hop questions: WordNet, questions over it, MuSiQue's files, grading, and what the warm start
is shown."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.loading import load_example
from tests.frameworks.world import ROOT, bin_of

hop = load_example("multi_hop_rag", "wordnet", "tasks", "grading", "demonstrations")

needs_wordnet = pytest.mark.skipif(
    not Path("/usr/share/wordnet/data.noun").exists(),
    reason="WordNet is missing: apt install wordnet-base",
)


# --- WordNet ---


def test_a_line_is_read_as_the_manual_says() -> None:
    line = (
        "02128385 05 n 03 lion 0 king_of_beasts 1 Panthera_leo 0 004 @ 02127808 n 0000 "
        '#m 02127492 n 0000 ~ 02128598 n 0000 + 00000001 v 0101 | large cat; "a lion"  \n'
    )
    key, synset = hop.wordnet.read_synset(line)
    assert key == "n02128385"
    assert synset.names == ("lion", "king of beasts", "Panthera leo")
    assert synset.gloss == 'large cat; "a lion"'
    assert synset.related == {"kind": ["n02127808"], "group": ["n02127492"]}


@needs_wordnet
def test_every_synset_has_a_passage() -> None:
    passages = hop.wordnet.passages()
    assert len(passages) == 117_659
    (adder,) = (one for one in passages if one.startswith("puff adder:"))
    assert adder.startswith("puff adder: kind: viper. group: Bitis. large African viper")


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, FileNotFoundError, "apt install wordnet-base, or set WORDNET=DIR"),
        ("  1 licence\n00001740 03 n 01 enti", ValueError, "data.noun, line 2: not a synset"),
    ],
)
def test_a_folder_without_wordnet_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    error: type[Exception],
    words: str,
) -> None:
    if content is not None:
        (tmp_path / "data.noun").write_text(content)
    monkeypatch.setenv("WORDNET", str(tmp_path))
    fresh = load_example("multi_hop_rag", "wordnet")
    with pytest.raises(error, match=words):
        fresh.wordnet.wordnet()


# --- questions ---


@needs_wordnet
def test_hops_take_turns_and_no_heldout_question_needs_a_passage_of_a_trained_one() -> None:
    trained, heldout = hop.tasks.train_tasks(3000, 1), hop.tasks.heldout_tasks(120)
    assert Counter(task["kind"] for task in heldout) == dict.fromkeys(
        ("2 hops", "3 hops", "4 hops"), 40
    )
    needed = [{title for task in tasks for title in task["path"]} for tasks in (trained, heldout)]
    assert not needed[0] & needed[1]
    assert len({task["id"] for task in heldout}) == 120
    assert trained == hop.tasks.train_tasks(3000, 1) != hop.tasks.train_tasks(3000, 2)


@needs_wordnet
def test_demonstrations_show_no_heldout_passage_and_at_times_the_right_answer() -> None:
    shown = {one.partition(": ")[0]: one for one in hop.wordnet.passages()}

    def search(query: str) -> str:  # by title, as the index does
        return shown.get(query.partition(": ")[2], "nothing found")

    made = hop.demonstrations.demonstrations(200, 1, search)
    messages = [message for one in made for message in one["messages"]]
    read = [
        message["content"].partition(": ")[0] for message in messages if "tool_call_id" in message
    ]
    assert read and not any(map(hop.tasks.is_heldout, read))
    right = {task["question"]: task["answers"] for task in hop.tasks.train_tasks(10_000, 1)}
    scores = [
        hop.grading.grade(
            one["messages"][-1]["content"] or "", right[one["messages"][1]["content"]]
        )
        for one in made
    ]
    assert 0.1 < sum(score == 1 for score in scores) / len(scores) < 0.6


# --- MuSiQue ---


QUESTION = "Where does the maker of Steel Rain live?"


def musique_line(**changes: object) -> str:
    paragraphs = [
        {
            "idx": 0,
            "title": "Steel Rain",
            "paragraph_text": "It was made by Ana Wirth.",
            "is_supporting": True,
        },
        {
            "idx": 1,
            "title": "Ana Wirth",
            "paragraph_text": "She lives in Graz.",
            "is_supporting": True,
        },
        {"idx": 2, "title": "Graz", "paragraph_text": "A town.", "is_supporting": False},
    ]
    entry = {
        "id": "2hop__1_2",
        "paragraphs": paragraphs,
        "question_decomposition": [],
        "answerable": True,
    }
    entry |= {"question": QUESTION, "answer": "Graz", "answer_aliases": ["City of Graz"]}
    return json.dumps({**entry, **changes}) + "\n"


def test_musique_is_read_as_it_ships(tmp_path: Path) -> None:
    lines = (
        musique_line()
        + musique_line(id="2hop__3_4")
        + musique_line(id="unanswerable", answerable=False)
    )
    (tmp_path / "musique_ans_v1.0_dev.jsonl").write_text(lines)
    tasks, passages = hop.tasks.load_musique(tmp_path, "dev")
    answers = ["Graz", "City of Graz"]
    assert tasks[0] == {
        "id": "2hop__1_2",
        "kind": "2 hops",
        "question": QUESTION,
        "answers": answers,
    }
    assert [task["id"] for task in tasks] == ["2hop__1_2", "2hop__3_4"]
    assert passages == [
        "Steel Rain: It was made by Ana Wirth.",
        "Ana Wirth: She lives in Graz.",
        "Graz: A town.",
    ]


# --- grading ---


@pytest.mark.parametrize(
    ("text", "answers", "reward"),
    [
        ("answer: Graz", ["Graz"], 1.0),
        ("Answer: the GRAZ!", ["Graz"], 1.0),
        ("answer: Linz", ["Graz"], 0.1),
        ("answer: \u30b0\u30e9\u30fc\u30c4", ["Graz"], 0.1),  # another script
        ("answer (Graz): Linz", ["Graz"], 0.1),  # what it is does not count
        ("answer: York", ["New York"], 0.9 * 2 / 3 + 0.1),  # precision 1, recall 1/2: F1 2/3
        # longer than right: precision, not F1
        ("answer: New York City", ["New York"], 0.9 * 2 / 3 + 0.1),
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


def test_recall_is_the_share_of_titles_that_were_read() -> None:
    results = ["lion: kind: big cat. large …\n\nliger: kind: big cat.", "nothing found"]
    assert hop.grading.recall(results, ["lion", "big cat"]) == 0.5


# --- in the environment of its framework ---


@pytest.mark.slow
def test_retriever_server_and_agent_hold_in_their_own_environment() -> None:
    python = bin_of("experiments") / "python"
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/examples/test_multi_hop_rag_search.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
