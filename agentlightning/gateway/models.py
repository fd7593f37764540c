"""The table of models: which backend answers a name, how it samples in train and val mode, and its
gate."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.gates import Gate

_log = logging.getLogger(__name__)
ANY: Final = "*"
"""The name of an entry that answers every name not registered; its backend is asked for that
name."""

AWAY: Final = "away"
"""Holds the calls of a model that a trainer serves, until the trainer registers it again."""
_AWAY_SECONDS: Final = 30.0


class ModelAwayError(BackendError):
    """The model of an attempt is not registered now; its calls wait at its `gate`."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(f"the model {gate.name!r} is not here", status=503, code="model_away")
        self.gate = gate


@dataclass(frozen=True)
class ModelEntry:
    """One model behind the gateway, with its name and `aliases`.

    In train mode every call samples with the temperature, top_p and top_k of `train`, in val mode
    of `val`, whatever the agent asks; their `max_tokens` is an upper limit. For None, the agent
    decides. Calls of a model that is not `trainable` are recorded but never trained, and the agent
    decides everything. A `lent` model is served by a trainer, which may come back at another
    address."""

    name: str
    backend: Backend
    trainable: bool = True
    train: Sampling | None = field(default_factory=Sampling)
    val: Sampling | None = field(default_factory=Sampling)
    aliases: tuple[str, ...] = ()
    lent: bool = False

    def __post_init__(self) -> None:
        if not self.trainable:
            object.__setattr__(self, "train", None)
            object.__setattr__(self, "val", None)
        if self.trainable and not self.backend.captures_tokens:
            raise ConfigError(
                f"the model {self.name!r} cannot be trained: its backend {self.backend.name} "
                "returns no token ids. Serve it with vLLM or SGLang, or register it with "
                "trainable=False (evaluation, prompt optimisation and fine-tuning on its answers "
                "work)"
            )


class ModelTable:
    """Model entries by name, which may change while calls run. ConfigError for a repeated name, or
    one that no URL can hold."""

    def __init__(self, entries: Iterable[ModelEntry] = ()) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[str, ModelEntry] = {}  # aliases too
        self._gates: dict[str, Gate] = {}
        self._noticed: set[str] = set()
        for entry in entries:
            if entry.name in self._entries:
                raise ConfigError(f"two models are called {entry.name!r}; give each its own name")
            self.put(entry)

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    def get(self, name: str) -> ModelEntry | None:
        """The entry with exactly this name or alias."""
        return self._names.get(name)

    def put(self, entry: ModelEntry) -> ModelEntry | None:
        """Add an entry, or replace that of its name, which is returned. Running calls keep their
        backend. ConfigError if another entry has one of its names."""
        for name in (entry.name, *entry.aliases):
            if any(part and not part.strip(".") for part in name.split("/")):
                raise ConfigError(f"{name!r} names no model: in a URL, dots lead elsewhere")
            other = self._names.get(name)
            if other is not None and other.name != entry.name:
                raise ConfigError(
                    f"the name {name!r} is taken by the model {other.name!r}; choose another"
                )
        replaced = self.remove(entry.name)
        self._entries[entry.name] = entry
        self._names |= dict.fromkeys((entry.name, *entry.aliases), entry)
        self.gate(entry.name)
        for name in (entry.name, *entry.aliases):  # resources may name it by an alias
            if name in self._gates:
                self._gates[name].release(AWAY)
        return replaced

    def remove(self, name: str) -> ModelEntry | None:
        """Remove and return an entry; None if there is none."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._names = {name: other for name, other in self._names.items() if other is not entry}
        return entry

    def gate(self, name: str) -> Gate:
        """The gate of the model with this name. It stays when the entry is replaced."""
        if name not in self._gates:
            self._gates[name] = Gate(name)
        return self._gates[name]

    def gates(self) -> Iterable[Gate]:
        return self._gates.values()

    def lost(self, entry: ModelEntry) -> None:
        """Hold the calls of a `lent` model whose trainer cannot be reached, for a while or until it
        is back."""
        if entry.lent and self._entries.get(entry.name) is entry:
            self.gate(entry.name).hold(AWAY, _AWAY_SECONDS)

    def resolve(self, name: str, given: Collection[str] = ()) -> ModelEntry:
        """The entry `name`; for an unknown name, the entry `ANY`, or else the only trainable model,
        with a notice in the log.

        ModelAwayError for a model that the attempt was `given` and that is not registered: it never
        gets another. BackendError 404 lists the names if there is not exactly one trainable
        model."""
        entry = self._names.get(name)
        if entry is None and name in given:
            gate = self.gate(name)
            gate.hold(AWAY)
            raise ModelAwayError(gate)
        entry = entry or self._names.get(ANY)
        if entry is not None:
            return entry
        entries = [entry for entry in self._entries.values() if entry.trainable]
        if len(entries) != 1:
            raise BackendError(
                f"no model is called {name!r}; the models here are: "
                f"{', '.join(sorted(self._names)) or 'none'}",
                status=404,
                code="model_not_found",
            )
        shown = name[:200]
        # names come from outside: bounded
        if shown not in self._noticed and len(self._noticed) < 1000:
            self._noticed.add(shown)
            _log.warning(
                "no model is called %r: its calls are answered by the model %r",
                shown,
                entries[0].name,
            )
        return entries[0]
