"""Collects a call's backend events into messages, ids and logprobs, per choice."""

from __future__ import annotations

import time
from typing import Any

from agentlightning.arrays import TokenIds, float32, int32
from agentlightning.gateway.backend import BackendEvent, Delta, Finished, Started, Usage
from agentlightning.types import FinishReason


class Choice:
    """One choice so far. `versions` is run-length encoded: `[[3, 10], [4, 2]]` is ten tokens of
    version 3, then two of 4."""

    def __init__(self) -> None:
        self.text: dict[str, list[str]] = {}
        self.other: dict[str, Any] = {}
        self.tool_calls: list[dict[str, Any]] = []
        self.token_ids = int32()
        self.logprobs = float32()
        self.logprob_entries: list[Any] = []
        self.versions: list[list[int]] = []
        self.last_version: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.untrainable: str | None = None

    def add(self, event: Delta) -> None:
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        self.logprob_entries.extend(event.logprob_entries)
        if event.token_ids:
            if self.versions and self.versions[-1][0] == event.version:
                self.versions[-1][1] += len(event.token_ids)
            else:
                self.versions.append([event.version, len(event.token_ids)])
        for name, value in event.delta.items():
            if name == "tool_calls":
                for part in value or ():
                    self._add_tool_call(part)
            elif isinstance(value, str):
                if name != "role":
                    self.text.setdefault(name, []).append(value)
            elif isinstance(value, list):
                self.other.setdefault(name, []).extend(value)
            elif value is not None:
                self.other[name] = value

    def _add_tool_call(self, part: dict[str, Any]) -> None:
        """A tool-call delta: the first of an index has its id, later ones more of its texts."""
        index = part.get("index", len(self.tool_calls))
        while len(self.tool_calls) <= index:
            self.tool_calls.append(
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
        call = self.tool_calls[index]
        function = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        if part.get("type") == "custom":  # a hosted model's call of a custom tool
            call |= {"type": "custom", "custom": {"name": "", "input": ""}}
            call.pop("function", None)
        if "custom" in call:
            custom = part.get("custom") or {}
            call["custom"]["name"] += custom.get("name") or ""
            call["custom"]["input"] += custom.get("input") or ""
            return
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
        # Fields of the server's own go back to it with the call, such as Gemini's signature of a
        # thought.
        call |= {
            name: value
            for name, value in part.items()
            if name not in ("index", "id", "type", "function")
        }

    def string(self, *names: str) -> str:
        """The first of these fields of the message that has text, such as `content`."""
        return next((text for name in names if (text := "".join(self.text.get(name, ())))), "")

    def message(self) -> dict[str, Any]:
        """The assistant message of chat completions; content is None for tool calls without
        text."""
        content = self.string("content")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.tool_calls else ""),
        }
        message |= {name: "".join(parts) for name, parts in self.text.items() if name != "content"}
        message |= self.other
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class Answer:
    """All `n` choices of one call; the answer's id, the model's name here, and when it was made
    (seconds since the epoch). `first_token_time` is in seconds of the monotonic clock."""

    def __init__(
        self, n: int = 1, response_id: str = "", model: str = "", created: int = 0
    ) -> None:
        self.response_id = response_id
        self.model = model
        self.created = created
        self.started = Started(int32())
        self.choices = [Choice() for _ in range(n)]
        self.usage: Usage | None = None
        self.first_token_time: float | None = None
        self.response_json: str | None = None  # of an answer that was passed through

    @property
    def prompt_token_ids(self) -> TokenIds:
        return self.started.prompt_token_ids

    def add(self, event: BackendEvent) -> None:
        match event:
            case Delta():
                if self.first_token_time is None:
                    self.first_token_time = time.monotonic()
                self.choices[event.index].add(event)
            case Finished():
                choice = self.choices[event.index]
                choice.finish_reason = event.finish_reason
                choice.stop_string = event.stop_string
                choice.untrainable = event.untrainable
                choice.last_version = event.version
                if event.versions and sum(count for _, count in event.versions) == len(
                    choice.token_ids
                ):
                    choice.versions = event.versions
            case Started():
                self.started = event
            case Usage():
                self.usage = event

    def settle(self) -> None:
        """Leave out the choices at the end that a backend which has answered did not give."""
        while len(self.choices) > 1 and self.choices[-1].finish_reason is None:
            self.choices.pop()

    def abort(self, reason: str) -> None:
        """Close every choice that has not finished; none is to be trained, because of `reason`."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or "abort"
            choice.untrainable = choice.untrainable or reason

    def token_counts(self) -> Usage:
        """Prompt and completion tokens: as reported where the backend reports them, else
        counted."""
        if self.usage is not None:
            return self.usage
        return Usage(
            len(self.prompt_token_ids), sum(len(choice.token_ids) for choice in self.choices)
        )
