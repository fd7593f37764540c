"""A patch of the program's own source: many ways of writing a prompt, and no wrong patch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentlightning.prompts.patching import applied, edits_for
from agentlightning.types import PromptText

PLAIN = "You are the clerk.\nAnswer in one line."
FILLED = "You are the clerk of {hole1}.\nAnswer in one line."

# name → (file, source, what the program sends, how its text comes about)
Form = tuple[str, str, str, Callable[[str], str]]


def run_python(source: str) -> str:
    """The text of a Python program: its `text`, where `hotel` is Ritz."""
    names: dict[str, Any] = {"hotel": "Ritz"}
    exec("import inspect, textwrap\n" + source, names)
    return names["text"]


def python(source: str, sent: str) -> Form:
    return "a.py", source, sent, run_python


FORMS: dict[str, Form] = {
    "a string": python(r"text = 'You are the clerk.\nAnswer in one line.'", PLAIN),
    "adjacent strings": python(
        "text = (\n    'You are the clerk.\\n'  # who\n    'Answer in one line.'\n)", PLAIN
    ),
    "three quotes": python('text = """You are the clerk.\nAnswer in one line."""', PLAIN),
    "three quotes, stripped": python(
        'text = """\nYou are the clerk.\nAnswer in one line.\n""".strip()', PLAIN
    ),
    "dedent": python(
        'def make():\n    return textwrap.dedent("""\\\n        You are the clerk.\n'
        '        Answer in one line.""")\ntext = make()',
        PLAIN,
    ),
    "a docstring": python(
        'def clerk():\n    """You are the clerk.\n    Answer in one line.\n    """\n'
        "text = inspect.cleandoc(clerk.__doc__)",
        PLAIN,
    ),
    "an f-string": python(r"text = f'You are the clerk of {hotel}.\nAnswer in one line.'", FILLED),
    "an f-string in three quotes": python(
        'text = f"""You are the clerk of {hotel!s:<4}.\nAnswer in one line."""', FILLED
    ),
    "adjacent, one of them an f-string": python(
        "text = (f'You are the clerk of {hotel}.\\n'\n    'Answer in one line.')", FILLED
    ),
    "format": python(
        r"text = 'You are the clerk of {name}.\nAnswer in one line.'.format(name=hotel)", FILLED
    ),
    "format without a field": python(
        r"text = 'You are the clerk.\nAnswer in one line.'.format(name=hotel)", PLAIN
    ),
    "format of three quotes": python(
        'text = """You are the clerk of {0}.\nAnswer in one line.""".format(hotel)', FILLED
    ),
    "percent": python(r"text = 'You are the clerk of %s.\nAnswer in one line.' % hotel", FILLED),
    "percent by name": python(
        r"text = 'You are the clerk of %(hotel)s.\nAnswer in one line.' % {'hotel': hotel}", FILLED
    ),
    "a dictionary": python(
        r"text = {'system': 'You are the clerk.\nAnswer in one line.'}['system']", PLAIN
    ),
    "a computed list": python(
        r"text = '\n'.join(['You are the clerk.', 'Answer in one line.'])", PLAIN
    ),
    "a sum": python(r"text = 'You are the clerk of ' + hotel + '.\nAnswer in one line.'", FILLED),
    "twice": python(
        "other = 'You are the clerk.\\nAnswer in one line.'\n"
        "text = 'You are the clerk.\\nAnswer in one line.'",
        PLAIN,
    ),
    "JSON": (
        "a.json",
        json.dumps({"model": "m", "system": PLAIN, "n": 1.10}, indent=1),
        PLAIN,
        lambda source: json.loads(source)["system"],
    ),
    "a YAML block": (
        "a.yaml",
        f"# prompts\nsystem: |-\n  {PLAIN.replace(chr(10), chr(10) + '  ')}\nother: x # kept\n",
        PLAIN,
        lambda source: yaml.safe_load(source)["system"],
    ),
    "YAML in quotes": (
        "a.yml",
        "system: 'You are the clerk.\n\n  Answer in one line.'\n",
        PLAIN,
        lambda source: yaml.safe_load(source)["system"],
    ),
    "folded YAML": (
        "a.yml",
        "system: >-\n  You are the clerk.\n\n  Answer in\n  one line.\n",
        PLAIN,
        lambda source: yaml.safe_load(source)["system"],
    ),
    "a text file": ("a.md", f"{PLAIN}\n", PLAIN, str.strip),
    "a text file with a field": (
        "a.txt",
        "You are the clerk of {hotel}.\nAnswer in one line.",
        FILLED,
        lambda source: source.format(hotel="Ritz"),
    ),
}
TEXTS = {
    "words": "Answer in two lines.",
    "braces": "Answer as {name} or {{x}} or {}.",
    "quotes": 'Answer in "two" \'lines\' and """three""""',
    "percent": "Answer 100 % of %s questions, 5%(x)s.",
    "lines": "Answer:\n\n  - first\n\t- then\nThe end.",
    "backslashes": "Answer C:\\new\\table \\{x\\} \\",
    "others": "Antworte höflich: 你好 \u200f שלום — é.",
}
NOT_WRITTEN = {"a computed list", "a sum", "twice", "folded YAML"}


def written(form: Form, new: str) -> bool:
    """Whether a variant of the patch gives the new text, so that a run would prove it; what the
    others give is never shown."""
    file, source, sent, run = form
    path = Path(file)
    text = sent.replace("Answer in one line.", new)
    found = edits_for({path: source}, PromptText(place="system", sent=sent, text=text))
    if isinstance(found, str):
        return False
    for edit in found:
        try:
            if run(applied(source, [edit])) == text.replace("{hole1}", "Ritz"):
                return True
        except (KeyError, ValueError, IndexError, TypeError):
            continue
    return False


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_is_written_in_the_form_that_it_had(name: str) -> None:
    missed = [kind for kind, new in TEXTS.items() if not written(FORMS[name], new)]
    expected = {"a docstring": ["lines"]}  # whose tabs `inspect.cleandoc` expands
    assert missed == (list(TEXTS) if name in NOT_WRITTEN else expected.get(name, []))


def test_the_rest_of_a_file_stays_as_it_is() -> None:
    source = '# é\nimport os\r\n\nA = "é"; B = "You are the clerk."  # the clerk\n'
    (edit, *_) = edits_for(
        {Path("a.py"): source},
        PromptText(place="system", sent="You are the clerk.", text="You are the guest."),
    )
    assert not isinstance(edit, str)
    assert applied(source, [edit]) == source.replace("the clerk.", "the guest.")


def test_a_file_that_cannot_be_read_has_no_prompt() -> None:
    broken = {Path("a.py"): "def (", Path("b.json"): '{"a": "Go."', Path("c.yaml"): "a: [Go."}
    prompt = PromptText(place="system", sent="Go.", text="Stay.")
    assert edits_for(broken, prompt) == "no file has it as one text"
