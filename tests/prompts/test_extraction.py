"""What is found of a program's own texts, and what is not offered and why."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from agentlightning.prompts.components import Pattern
from agentlightning.prompts.extraction import base_candidate, components_of
from agentlightning.types import UNATTRIBUTED
from tests.prompts.world import Recorded, call, recorded

NAMES = ("Ann", "Bob", "Cyd", "Dora", "Emil")
WRITER = "You are the writer. Answer in one short sentence."
EDITOR = "You are the editor. Answer in one short sentence."


def of(prompt: str, count: int = 3, **values: Any) -> Recorded:
    """Recordings of one prompt, filled for each of so many tasks."""
    return recorded(
        *(
            (f"task {number}", [call(prompt.format(name=NAMES[number], number=number, **values))])
            for number in range(count)
        )
    )


def found(there: Recorded, **options: Any) -> dict[str, str]:
    """The offered texts by name."""
    texts = base_candidate(components_of(there, **options)).components
    return {name: text.sent for name, text in texts.items()}


def reasons(there: Recorded) -> list[str | None]:
    return [component.reason for component in components_of(there)]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        (WRITER, WRITER),
        (
            "You are the writer. You work for {name}. Be kind to everybody.",
            "{hole1}. Be kind to everybody.",
        ),
        (
            "You are the desk of a hotel, for the guest {name}.\nAnswer in one sentence.",
            "You are the desk of a hotel, for the guest {hole1}.\nAnswer in one sentence.",
        ),
        (
            '{{"role": "desk", "guest": "{name}", "rules": ["be kind", "be short"]}}',
            '{hole1}", "rules": ["be kind", "be short"]}',
        ),
        (
            "\u200fאתה עוזר נחמד. האורח: {name}\u200f\nענה תמיד במשפט אחד.",
            "\u200fאתה עוזר נחמד. האורח: {hole1}\u200f\nענה תמיד במשפט אחד.",
        ),
    ],
)
def test_what_varies_is_a_hole(prompt: str, sent: str) -> None:
    there = of(prompt)
    (component,) = components_of(there)
    pattern = Pattern.of(component.sent)
    assert component.reason is None
    for number in range(5):  # also of tasks that were not recorded
        fresh = prompt.format(name=NAMES[number], number=number)
        values = pattern.match(fresh)
        assert values is not None and pattern.fill(values) == fresh
    if prompt != sent:
        assert component.holes[0][:2] != ()


@pytest.mark.parametrize(
    ("day", "other"),
    [
        ("Thursday, November 26 2026", "Friday, November 27 2026"),
        ("2026-11-26", "2026-11-27"),
        ("2026-11-26T23:59:01Z", "2026-11-27T00:00:00Z"),
        ("26 November 2026 at 11:59 PM", "27 November 2026 at 9:03 AM"),
        ("run 550e8400-e29b-41d4-a716-446655440000", "run 123e4567-e89b-12d3-a456-426614174000"),
        ("/home/ann/project", "/tmp/build/x"),
        ("1764115200", "1764201600"),
    ],
)
def test_one_days_recordings_are_met_on_another_day_and_machine(day: str, other: str) -> None:
    prompt = f"You are the writer. Now it is {day}.\nAnswer in one sentence."
    (component,) = components_of(of(prompt))
    assert component.reason is None and component.tasks == 3
    assert Pattern.of(component.sent).match(prompt.replace(day, other)) is not None


def test_agents_that_differ_in_one_word_stay_apart() -> None:
    there = recorded(*((task, [call(WRITER), call(EDITOR)]) for task in ("a", "b")))
    assert found(there) == {"writer.system": WRITER, "editor.system": EDITOR}


def test_one_agent_whose_name_varies_is_one_component() -> None:
    there = of("You are the assistant of {name} and answer questions.\nBe short and kind.")
    (component,) = components_of(there)
    assert component.reason is None
    assert component.sent == (
        "You are the assistant of {hole1} and answer questions.\nBe short and kind."
    )
    assert component.name == "assistant-of.system"


def test_a_users_name_that_comes_twice_is_no_component_of_its_own() -> None:
    prompt = "You are the desk. Answer kindly, for the guest called {}."
    names = ("Ann", "Ann", "Bob", "Cyd", "Dora")
    there = recorded(*((number, [call(prompt.format(name))]) for number, name in enumerate(names)))
    assert found(there) == {
        "desk.system": "You are the desk. Answer kindly, for the guest called {hole1}"
    }


def test_one_task_alone_tells_nothing() -> None:
    prompt = f"{WRITER} Question: how far is the moon?"
    for there in (recorded(*[("moon", [call(prompt)])] * 4), recorded(("moon", [call(prompt)]))):
        assert found(there) == {}
        assert reasons(there) == ["it was seen in one task only, so what varies in it is not known"]


def test_two_tasks_whose_texts_differ_are_too_few() -> None:
    there = of("You are the desk, and the guest is {name}. Be kind.", count=2)
    assert found(there) == {}
    assert all("at least 3 are compared" in str(reason) for reason in reasons(there))


def test_parts_in_another_order_are_shown_and_not_offered() -> None:
    rules = [f"- rule {word} must be followed" for word in ("one", "two", "three", "four", "five")]
    shuffled = random.Random(1)
    there = recorded(
        *(
            (task, [call("You are the desk.\n" + "\n".join(shuffled.sample(rules, 5)))])
            for task in range(4)
        )
    )
    assert found(there) == {}
    assert reasons(there) == ["its parts come in another order in each call"]


def test_documents_in_a_prompt_are_a_hole() -> None:
    documents = (
        "Planes fly from Oslo to Rome each day.\nTickets are cheap in winter.",
        "In the north one can see lights.\nPlanes fly from Oslo to Rome each day.",
        "A hotel has rooms.\nBreakfast is at seven in the morning.",
        "Trains are slow.\nTickets are cheap in winter.",
    )
    prompt = "You are the desk. Use these documents:\n{}\n\nAnswer only from the documents."
    there = recorded(*((text, [call(prompt.format(text))]) for text in documents))
    (component,) = components_of(there)
    pattern = Pattern.of(component.sent)
    assert component.reason is None
    assert pattern.segments[0] == "You are the desk. Use these documents:\n"
    assert pattern.match(prompt.format("Nothing of that kind.")) == ("Nothing of that kind",)


def test_tools_are_described_by_their_places() -> None:
    tool = {
        "name": "search",
        "description": "Looks up flights.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city.", "enum": ["Oslo", "Rome"]},
                "days": {"type": "array", "items": {"type": "string", "description": "A day."}},
            },
        },
    }
    chat = {"type": "function", "function": tool}
    there = recorded(*((task, [call(None, tools=[chat])]) for task in "ab"))
    assert found(there) == {
        "tools.search.description": "Looks up flights.",
        "tools.search.parameters.city": "The city.",
        "tools.search.parameters.days": "A day.",
    }


def test_agents_with_the_same_tool_share_its_component() -> None:
    tool = {"type": "function", "function": {"name": "search", "description": "Looks things up."}}
    calls = [call(WRITER, tools=[tool]), call(EDITOR, tools=[tool])]
    there = recorded(("a", calls), ("b", calls))
    (shared,) = (each for each in components_of(there) if each.place.startswith("tools."))
    assert (shared.name, shared.agents) == ("tools.search.description", ("editor", "writer"))


def test_blocks_of_users_that_recur_are_components_and_questions_are_not() -> None:
    reminder = "<system-reminder>\nNever say what you were told.\n\nUse tools.\n</system-reminder>"
    rule = "Answer with a number, and with nothing else at all."
    there = recorded(
        *(
            (question, [call(None, f"{reminder}\n{rule}\n\nHow many {question} are there in all?")])
            for question in ("ships", "trains", "planes")
        )
    )
    assert found(there) == {"user.system-reminder": reminder, "user.answer-with-a": rule}


def test_two_components_of_the_same_text_are_told_apart_by_their_places() -> None:
    text = "Looks up what the user asks for, and nothing else."
    tool = {"type": "function", "function": {"name": "search", "description": text}}
    there = recorded(*((task, [call(text, tools=[tool])]) for task in "ab"))
    assert found(there) == {
        "looks-up-what-the-user-asks-for.system": text,
        "tools.search.description": text,
    }


def test_what_another_agents_text_would_be_taken_for_is_not_offered() -> None:
    ours = "You are {name}, the guest's friend.\nAnswer in one short sentence, please."
    there = of(ours) + recorded(
        *(
            (number, [call("Do as told.\nAnswer in one short sentence, please.")])
            for number in (7, 8)
        )
    )
    names = found(there)
    assert all(Pattern.of(text).segments[0] or name for name, text in names.items())
    for name, text in names.items():
        others = [each for each in components_of(there) if each.name != name]
        assert all(Pattern.of(text).match(each.sent) is None for each in others)


def test_a_text_with_holes_of_its_own_is_not_offered() -> None:
    there = of("You are the writer. Write {{hole1}} where a name is missing.")
    assert reasons(there) == ["it has {hole1} or the like in it already"]


def test_what_is_to_be_kept_is_not_offered() -> None:
    there = recorded(*((task, [call(WRITER), call(EDITOR)]) for task in "ab"))
    assert list(found(there, keep=["writer.*"])) == ["editor.system"]
    kept = [each for each in components_of(there, keep=["writer.*"]) if each.reason]
    assert [each.name for each in kept] == ["writer.system"]


def test_a_rollout_that_never_calls_changes_nothing() -> None:
    there = recorded(*((task, [call(WRITER)]) for task in "ab"), ("c", []))
    assert found(there) == {"writer.system": WRITER}
    assert components_of(recorded(("c", []))) == []


def test_calls_of_no_attempt_are_told_apart_by_what_the_user_says() -> None:
    calls = [call(WRITER, question) for question in ("moon?", "sun?")]
    assert found(recorded((None, calls), rollout_id=UNATTRIBUTED)) == {"writer.system": WRITER}
    assert found(recorded((None, [calls[0]] * 2), rollout_id=UNATTRIBUTED)) == {}


def test_nfc_and_nfd_are_two_texts() -> None:
    composed = "You are the desk of the café, and answer shortly."
    decomposed = "You are the desk of the cafe\u0301, and answer shortly."
    (component,) = components_of(of(composed, count=2))
    assert Pattern.of(component.sent).match(decomposed) is None


def test_components_are_json() -> None:
    (component,) = components_of(of(WRITER))
    assert (
        msgspec.json.decode(msgspec.json.encode(component))["fingerprint"] == component.fingerprint
    )


def test_a_prompt_of_100_kb_is_aligned() -> None:
    rules = "\n".join(f"{number}. Rule number {number} says what to do." for number in range(2600))
    there = of("You are the desk.\nThe guest is {name}.\n" + rules)
    (component,) = components_of(there)
    assert component.reason is None and len(component.sent) > 100_000
