"""Compare what was sampled with its text tokenised anew.

    python scripts/drift.py [STORE] --tokenizer ID|DIR [--run ID] [--model NAME] [--examples N] [--json]

Agents keep text, and text is tokenised again: by the chat template at the next call, by tools that
train from transcripts. Three checks compare recorded ids with ids made anew:

    answer    the sampled ids, and the tokenisation of their own text
                  can drift by split, special token and normalisation
    history   prompt and sampled ids of a call, and the next prompt of the conversation, which should begin with them
                  (1, 2) + (7, 8), later (1, 2, 7, 8, 3, 4)  →  no drift
                  (1, 2) + (7, 8), later (1, 2, 9, 3, 4)     →  drift of 2 tokens, of any kind
    prompt    the recorded prompt, and the recorded messages rendered and tokenised anew
                  can drift by split, special token and template

Prompts that repeat recorded answers in their own ids (`chat.recorded`) do so on purpose, which is
no drift: a history agrees with them, and before such a prompt is compared with its rendering, its
own text is tokenised anew too.

The first difference tells one of six kinds. `·` separates tokens, `⏎` is a line break; recorded →
anew:

`·` separates tokens, `⏎` is a line break; recorded → anew:

    split           the text is the same, cut into other tokens
                        th·ere  →  there
    special token   a token that is reserved, or that nothing spells, on one side; ordinary text or nothing on the other
                        <·|·end·|·>  →  <|end|>     (the policy spelled out what the tokenizer reads as one token)
                        yes·<|user|>·no  →  yes·no  (the text that agents get leaves special tokens out)
    turn boundary   the answer's words are the same, its edges are not: white space around them, how the turn ends, or a
                    token that reaches across the edge
                        yes·⏎·<|end|>  →  yes·<|end|>
                        yes·.  →  yes·.⏎            (the text goes on with a line break)
    tool call       a tool call is written otherwise than it was sampled
                        {"q":"sun"}  →  {"q": "sun"}
    normalisation   the words are the same but for Unicode's forms, case, white space within, or bytes that are no UTF-8
                        e·◌́  →  é
    template        the text is another: the template rewrites what is past, or is not the one that was used
                        <think>·hm·</think>·yes  →  yes
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args
from unittest.mock import patch

import click
import msgspec

from agentlightning import semconv
from agentlightning.cli.options import make_table, print_json, print_table
from agentlightning.cli.place import Named, Place, newest_store, with_place
from agentlightning.data.continuity import canonical, words_of
from agentlightning.data.token_bytes import MARKERS, TokenBytes
from agentlightning.display import counting
from agentlightning.errors import AgentLightningError, BackendError, ConfigError
from agentlightning.gateway.backends.factory import chat_template
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.tracing.dialects import input_messages, output_messages
from agentlightning.types import And, Condition, Filter, Span

T = TypeVar("T")
Check: TypeAlias = Literal["answer", "history", "prompt"]
CHECKS: Final[tuple[Check, ...]] = get_args(Check)
Ids: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal[
    "split", "special token", "turn boundary", "tool call", "normalisation", "template"
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_SHOWN_BEFORE, _SHOWN_AFTER = 3, 8  # tokens of an example
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class RecordedCall:
    """What the span of a call says about its tokens. `answers` are the sampled ids of each choice,
    `replies` their messages; `variables` are those the request gave the template. Without
    `messages` (they were not captured, or the call continued a plain prompt) only answers can be
    compared."""

    rollout_id: str
    attempt_id: str
    call_index: int | None
    model: str
    start_time: float
    prompt: Ids
    answers: tuple[Ids, ...]
    replies: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    spliced_tokens: int = 0


class _Request(msgspec.Struct):
    chat_template_kwargs: dict[str, Any] = {}


def recorded_call(span: Span) -> RecordedCall | None:
    """None for a span without exact ids. Attributes that are missing or were redacted count as
    empty."""
    if span.tokens is None:
        return None
    of = span.attributes.get
    index, spliced = of(semconv.CALL_INDEX), of(semconv.RECORDED_SPLICE)
    return RecordedCall(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        call_index=index if isinstance(index, int) else None,
        model=str(of(semconv.GEN_AI_RESPONSE_MODEL, "")),
        start_time=span.start_time,
        prompt=tuple(span.tokens.prompt_token_ids),
        answers=tuple(tuple(choice.token_ids) for choice in span.tokens.choices),
        replies=output_messages(span.attributes),
        messages=input_messages(span.attributes),
        tools=_decoded(of(semconv.GEN_AI_TOOL_DEFINITIONS), list[dict[str, Any]]) or [],
        variables=(_decoded(of(semconv.CALL_REQUEST), _Request) or _Request()).chat_template_kwargs,
        spliced_tokens=spliced if isinstance(spliced, int) else 0,
    )


def _decoded(text: object, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        return None


@dataclass(frozen=True)
class Drift:
    """Recorded ids that are others when made anew.

    `tokens` counts the recorded ones: from the first difference to the last; in a history from the
    first difference to the answer's end, as none of them is shared with the later prompt. `before`,
    `recorded` and `anew` are the texts of the tokens just before the first difference, and of a few
    from it on."""

    kind: Kind
    tokens: int
    before: tuple[str, ...]
    recorded: tuple[str, ...]
    anew: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """One check of `tokens` recorded ids of a call; in a history it is the earlier call's."""

    check: Check
    rollout_id: str
    attempt_id: str
    call_index: int | None
    tokens: int
    drift: Drift | None

    @classmethod
    def of(cls, check: Check, call: RecordedCall, tokens: int, drift: Drift | None) -> Comparison:
        return cls(check, call.rollout_id, call.attempt_id, call.call_index, tokens, drift)


@dataclass
class Tally:
    calls: int = 0
    tokens: int = 0

    def count(self, tokens: int) -> None:
        self.calls += 1
        self.tokens += tokens


@dataclass(frozen=True)
class Found:
    """All drift of a kind in a check; the shares are of what was compared."""

    check: Check
    kind: Kind
    calls: int
    tokens: int
    share_of_calls: float
    share_of_tokens: float


class DriftReport:
    """Comparisons summed up, with up to `limit` examples of each check and kind."""

    def __init__(self, limit: int) -> None:
        self.compared = {check: Tally() for check in CHECKS}
        self._limit = limit
        self._found: defaultdict[tuple[Check, Kind], Tally] = defaultdict(Tally)
        self._examples: defaultdict[tuple[Check, Kind], list[Comparison]] = defaultdict(list)

    def add(self, comparison: Comparison) -> None:
        self.compared[comparison.check].count(comparison.tokens)
        if comparison.drift is not None:
            row = comparison.check, comparison.drift.kind
            self._found[row].count(comparison.drift.tokens)
            if len(self._examples[row]) < self._limit:
                self._examples[row].append(comparison)

    def found(self) -> list[Found]:
        """In the order of `CHECKS`, and in each the most frequent kind first."""
        rows = [
            Found(
                check,
                kind,
                tally.calls,
                tally.tokens,
                tally.calls / of.calls,
                tally.tokens / of.tokens,
            )
            for (check, kind), tally in self._found.items()
            for of in (self.compared[check],)
        ]
        return sorted(rows, key=lambda row: (CHECKS.index(row.check), -row.calls))

    def examples(self) -> list[Comparison]:
        """In the order of `found`."""
        return [example for row in self.found() for example in self._examples[row.check, row.kind]]


@dataclass(frozen=True)
class Difference:
    """The shortest ranges, recorded[start:recorded_end] and anew[start:anew_end], that begin with
    the first difference and end at the same byte. `overhangs`: there are none, since the last token
    of anew reaches beyond all recorded."""

    start: int
    recorded_end: int
    anew_end: int
    same_text: bool
    overhangs: bool


class Classifier:
    """Tells the kind of a drift, for ids that are known to differ."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._id_to_token = token_bytes.tokenizer.id_to_token
        added = token_bytes.tokenizer.get_added_tokens_decoder()
        self._reserved = frozenset(added)
        self._specials = tuple(token.content for token in added.values() if token.special)
        self._special = re.compile("|".join(map(re.escape, self._specials)) or "(?!)")

    def of_history(self, prompt: Ids, answer: Ids, later: Ids, calls_tools: bool) -> Drift:
        recorded = (*prompt, *answer)
        difference = self.difference(recorded, later)
        across = difference.start < len(prompt) < difference.recorded_end
        if difference.overhangs or (difference.same_text and across):
            kind = "turn boundary"
        elif difference.same_text:
            kind = self.cut(recorded, later, difference)
        else:
            kind = self._reworded(prompt, answer, later, calls_tools)
        return self.drift(kind, recorded, later, difference.start, len(recorded) - difference.start)

    def difference(self, recorded: Ids, anew: Ids) -> Difference:
        start = recorded_end = anew_end = common_length(recorded, anew)
        left = right = b""  # what the two ranges spell so far
        while True:
            if len(right) <= len(left) and anew_end < len(anew):
                right += self._spelling(anew[anew_end])
                anew_end += 1
            elif recorded_end < len(recorded):
                left += self._spelling(recorded[recorded_end])
                recorded_end += 1
            else:
                break
            if len(left) == len(right) and start not in (recorded_end, anew_end):
                break
        overhangs = len(left) < len(right) and right.startswith(left)
        return Difference(start, recorded_end, anew_end, left == right, overhangs)

    def _spelling(self, token_id: int) -> bytes:
        """The token's own bytes, those of a word with the space it begins with."""
        if self._token_bytes.exact:
            return self._token_bytes[token_id]
        token = self._id_to_token(token_id) or ""
        byte = _BYTE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def cut(self, recorded: Ids, anew: Ids, difference: Difference) -> Kind:
        """The kind where both sides spell the same text."""
        left = recorded[difference.start : difference.recorded_end]
        right = anew[difference.start : difference.anew_end]
        return "split" if self._unwritten(left) == self._unwritten(right) else "special token"

    def _unwritten(self, ids: Ids) -> list[int]:
        """Those that no tokenizer makes of ordinary text: reserved ones, and ids beyond the
        vocabulary."""
        return [
            token_id
            for token_id in ids
            if token_id in self._reserved or not self._spelling(token_id)
        ]

    def _reworded(self, prompt: Ids, answer: Ids, later: Ids, calls_tools: bool) -> Kind:
        """The kind where an answer, or what came before it, is another text in a later prompt."""
        text = self._token_bytes.text
        before, rendered = text(list(prompt)), text(list(later))
        said = text([*prompt, *answer])[len(before) :]
        if not rendered.startswith(before):
            return "template"
        rendered = rendered[len(before) :]
        words = self._words(said)
        place = common_length(said, rendered)
        # A special token is one thing: the difference does not lie within it.
        place = next(
            (m.start() for m in self._special.finditer(said) if m.start() < place < m.end()), place
        )
        if rendered.startswith(said):
            return "normalisation"  # only bytes that are no text differ
        if rendered.lstrip().startswith(words):
            return "turn boundary"
        if calls_tools and place >= _calls_begin(said):
            return "tool call"
        if self._special.match(said, place):
            return "special token"
        if self._special.match(rendered, place):
            return "turn boundary"
        return "normalisation" if canonical(rendered).startswith(canonical(words)) else "template"

    def _words(self, said: str) -> str:
        """The answer without white space around it and the special tokens that end it."""
        words = said.strip()
        while end := next((special for special in self._specials if words.endswith(special)), None):
            words = words.removesuffix(end).rstrip()
        return words

    def drift(self, kind: Kind, recorded: Ids, anew: Ids, start: int, tokens: int) -> Drift:
        return Drift(
            kind,
            tokens,
            before=self.shown(recorded[max(0, start - _SHOWN_BEFORE) : start]),
            recorded=self.shown(recorded[start : start + _SHOWN_AFTER]),
            anew=self.shown(anew[start : start + _SHOWN_AFTER]),
        )

    def shown(self, ids: Ids) -> tuple[str, ...]:
        """The text of each token; of one without any its id, as `#17`."""
        return tuple(
            self._spelling(token_id).decode(errors="backslashreplace") or f"#{token_id}"
            for token_id in ids
        )

    def told(self, recorded: Ids, anew: Ids, *, otherwise: Kind) -> Drift:
        found = self.difference(recorded, anew)
        kind = self.cut(recorded, anew, found) if found.same_text else otherwise
        # From the first difference to the last; where something was only put in, one.
        same = found.start + common_length(recorded[found.start :][::-1], anew[found.start :][::-1])
        return self.drift(kind, recorded, anew, found.start, max(1, len(recorded) - same))


def _calls_begin(said: str) -> int:
    """Where tool calls begin, with the space before them; an answer without a known marker is all
    tool call."""
    marked = min((said.find(marker) for marker in MARKERS if marker in said), default=0)
    return len(said[:marked].rstrip())


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many ids, or characters, the two begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next(
        (place for place, (left, right) in pairs if left != right), min(len(one), len(other))
    )


class DriftCheck:
    """Compares calls as they come, each after those in its history. The last `remembered` answers
    are looked for in later prompts. `refused` counts prompts that the template refuses to render,
    `refusal` is what it says."""

    def __init__(self, chat: ChatTemplate, *, remembered: int = 128) -> None:
        self.refused = 0
        self.refusal = ""
        self._chat = chat
        self._classifier = Classifier(chat.token_bytes)
        self._remembered = remembered
        self._answered: OrderedDict[bytes, tuple[RecordedCall, int]] = OrderedDict()

    def compare(self, call: RecordedCall) -> list[Comparison]:
        """What the call's answers, history and prompt are compared with. A history is compared with
        the last of the answers in it; that one's prompt has been compared with those before."""
        found = [self._answer(call, index) for index in range(len(call.answers))]
        if call.messages:
            prefixes = list(_prefixes(call))
            found += filter(None, (self._history(call, prefixes), self._prompt(call)))
            for index, reply in enumerate(call.replies[: len(call.answers)]):
                self._answered[_answered(prefixes[-1], reply)] = call, index
            while len(self._answered) > self._remembered:
                self._answered.popitem(last=False)
        return found

    def _answer(self, call: RecordedCall, index: int) -> Comparison:
        sampled = call.answers[index]
        anew = self._anew(sampled)
        drift = (
            self._classifier.told(sampled, anew, otherwise="normalisation")
            if sampled != anew
            else None
        )
        return Comparison.of("answer", call, len(sampled), drift)

    def _history(self, later: RecordedCall, prefixes: list[bytes]) -> Comparison | None:
        for place in reversed(range(len(later.messages))):
            message = later.messages[place]
            if message.get("role") != "assistant":
                continue
            call, index = self._answered.get(_answered(prefixes[place], message), (None, 0))
            if call is None:  # an answer that the agent has changed, or one from elsewhere
                continue
            recorded = (*call.prompt, *call.answers[index])
            drift = None
            if later.prompt[: len(recorded)] != recorded:
                calls_tools = bool(call.replies[index].get("tool_calls"))
                drift = self._classifier.of_history(
                    call.prompt, call.answers[index], later.prompt, calls_tools
                )
            return Comparison.of("history", call, len(recorded), drift)
        return None

    def _prompt(self, call: RecordedCall) -> Comparison | None:
        recorded = self._anew(call.prompt) if call.spliced_tokens else call.prompt
        try:
            rendered = self._rendered(call, call.tools)
            # Where an agent offers tools but lets none be called, some servers leave them out and
            # some do not.
            if rendered != recorded and call.tools and self._rendered(call, []) == recorded:
                rendered = recorded
        except BackendError as error:
            self.refused += 1
            self.refusal = str(error)
            return None
        drift = (
            self._classifier.told(recorded, rendered, otherwise="template")
            if recorded != rendered
            else None
        )
        return Comparison.of("prompt", call, len(recorded), drift)

    def _rendered(self, call: RecordedCall, tools: list[dict[str, Any]]) -> Ids:
        """The prompt as of the time of the call, for templates that tell the model the date."""
        with patch("transformers.utils.chat_template_utils.datetime") as clock:
            clock.now.return_value = datetime.fromtimestamp(call.start_time)
            return self._chat.encode(self._chat.render(call.messages, tools, **call.variables))

    def _anew(self, ids: Ids) -> Ids:
        return self._chat.encode(self._chat.token_bytes.text(list(ids)))


def _prefixes(call: RecordedCall) -> Iterator[bytes]:
    """Digests of what the call asked up to each message, excluded, and of all of it: len(messages)
    + 1 in all."""
    asked = (call.rollout_id, call.attempt_id, call.model, call.tools, call.variables)
    digest = hashlib.blake2b(msgspec.json.encode(asked, order="sorted"), digest_size=16)
    yield digest.digest()
    for message in call.messages:
        digest.update(msgspec.json.encode(message, order="sorted"))
        yield digest.digest()


def _answered(prefix: bytes, message: Mapping[str, Any]) -> bytes:
    """Names an answer by what was asked and its words."""
    return prefix + words_of(message)


# --- the command ----------------------------------------------------------------------------------

_AT_ONCE: Final = 32  # spans held in memory, each with a whole prompt
_SEPARATOR: Final = "·"
_UNITS: Final = {"answer": "answers", "history": "histories", "prompt": "prompts"}


@click.command()
@click.option(
    "--tokenizer",
    "source",
    metavar="ID|DIR",
    required=True,
    help="The model's: directory or hub id.",
)
@click.option("--run", "run_id", metavar="ID", help="Only calls of this run.")
@click.option("--model", metavar="NAME", help="Only calls that this model answered.")
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Per check and kind.",
)
@with_place(Named(click.argument("address", metavar="[STORE]", required=False), newest_store))
async def drift(
    place: Place, source: str, run_id: str | None, model: str | None, examples: int, as_json: bool
) -> None:
    """Compare what was sampled with its text tokenised anew.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and
    runs/*."""

    check, report = await _compare(place, source, _calls(run_id, model), examples)
    if as_json:
        told = {
            "compared": report.compared,
            "drift": report.found(),
            "refused_prompts": check.refused,
        }
        print_json(told | {"examples": report.examples()})
        return
    _show(check, report)


def _calls(run_id: str | None, model: str | None) -> Filter:
    asked = (
        (True, Condition("has_tokens", "eq", True)),
        (run_id, Condition("run_id", "eq", run_id)),
        (model, Condition(f"attributes.{semconv.GEN_AI_RESPONSE_MODEL}", "eq", model)),
    )
    return And([condition for value, condition in asked if value is not None])


async def _compare(
    place: Place, source: str, where: Filter, examples: int
) -> tuple[DriftCheck, DriftReport]:
    async with place.open(reading=True) as store:
        check, report = DriftCheck(chat_template(source)), DriftReport(examples)
        cursor, done = None, 0
        with counting(
            "calls", (await store.page_spans(where, limit=0, with_total=True)).total
        ) as advance:
            while True:
                # In the order of attempts, and in each as its calls were finished: earlier ones
                # come before later ones.
                page = await store.page_spans(where, limit=_AT_ONCE, cursor=cursor)
                for call in filter(None, map(recorded_call, page.items)):
                    for comparison in check.compare(call):
                        report.add(comparison)
                done += len(page.items)
                advance(done)
                cursor = page.next_cursor
                if cursor is None:
                    break
    if not report.compared["answer"].calls:
        asked = " of that run or model" if len(where.of) > 1 else ""
        raise ConfigError(
            f"{place} holds no calls with exact token ids{asked}; the gateway captures them where "
            "the backend returns them, and `agl runs` lists runs"
        )
    return check, report


# --- what is shown --------------------------------------------------------------------------------


def _show(check: DriftCheck, report: DriftReport) -> None:
    compared = [
        f"{tally.calls:,} {_UNITS[name]} ({tally.tokens:,} tokens)"
        for name, tally in report.compared.items()
    ]
    print(f"compared {', '.join(compared)}")
    if check.refused:
        refusal = visible(check.refusal)
        print(
            f"{check.refused:,} prompts were left out, which this tokenizer's template refuses: "
            f"{refusal}"
        )
    found = report.found()
    if not found:
        print("no drift")
        return
    names = ("check", "kind", "calls", "share", "tokens", "share")
    rows = [
        (
            one.check,
            one.kind,
            f"{one.calls:,}",
            f"{one.share_of_calls:.2%}",
            f"{one.tokens:,}",
            f"{one.share_of_tokens:.2%}",
        )
        for one in found
    ]
    print_table(make_table(names, rows, right=("calls", "share", "tokens")))
    for example in report.examples():
        print("\n".join(_lines(example)))


def _lines(example: Comparison) -> list[str]:
    drift = example.drift
    assert drift is not None, "only drift is kept as an example"
    call = "" if example.call_index is None else f", call {example.call_index}"
    before = _SEPARATOR.join(map(visible, drift.before))
    return [
        f"{example.check}, {drift.kind}: rollout {example.rollout_id}, attempt "
        f"{example.attempt_id}{call}",
        f"    recorded  {before} » {_SEPARATOR.join(map(visible, drift.recorded))}",
        f"    anew      {before} » {_SEPARATOR.join(map(visible, drift.anew))}",
    ]


def visible(text: str) -> str:
    """A line break as `\\n`, and nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    try:
        return int(
            drift.main(None if arguments is None else list(arguments), standalone_mode=False) or 0
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AgentLightningError as error:
        click.echo(f"error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
