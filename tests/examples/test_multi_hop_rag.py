"""Multi-hop questions: the world that is made, MuSiQue's files, grading, and what the warm start is
shown."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.loading import load_example
from tests.frameworks.world import ROOT, bin_of

hop = load_example("multi_hop_rag", "tasks", "grading", "demonstrations")


# --- the world ---


def test_numbers_of_hops_take_turns_and_no_heldout_question_begins_with_a_trained_fact() -> None:
    trained, heldout = hop.tasks.train_tasks(3000, 1), hop.tasks.heldout_tasks(300)
    assert Counter(task["kind"] for task in heldout) == dict.fromkeys(
        ("2 hops", "3 hops", "4 hops"), 100
    )
    first_facts = [
        {(task["entity"], task["relations"][0]) for task in tasks} for tasks in (trained, heldout)
    ]
    assert not first_facts[0] & first_facts[1]
    assert trained == hop.tasks.train_tasks(3000, 1) != hop.tasks.train_tasks(3000, 2)


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
