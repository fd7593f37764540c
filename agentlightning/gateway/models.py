"""Which backend answers a model name, and how it samples in train and val mode.

The table knows names and backends. It does not know requests, rollouts or what a backend is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import Backend, Sampling

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelEntry:
    """One model behind the gateway.

    In train mode every call samples with `train`'s temperature, top_p and top_k, in val mode with `val`'s, whatever
    the agent asked; `max_tokens` of either is a ceiling for the agent's own. Calls of a model that is not `trainable`
    are captured and never trained."""

    name: str
    backend: Backend
    trainable: bool = True
    train: Sampling = field(default_factory=Sampling)
    val: Sampling = field(default_factory=Sampling)


class ModelTable:
    """Model entries by name, which may change while calls run. ConfigError for a name given twice."""

    def __init__(self, entries: Iterable[ModelEntry] = ()) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._noticed: set[str] = set()
        for entry in entries:
            if entry.name in self._entries:
                raise ConfigError(f"two models are called {entry.name!r}; give each its own name")
            self._entries[entry.name] = entry

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    def put(self, entry: ModelEntry) -> ModelEntry | None:
        """Add an entry, or replace the one of its name, which is returned. Running calls keep the backend they have."""
        replaced = self._entries.get(entry.name)
        self._entries[entry.name] = entry
        return replaced

    def remove(self, name: str) -> ModelEntry | None:
        """Take an entry away and return it, or None where there is none of that name."""
        return self._entries.pop(name, None)

    def resolve(self, name: str) -> ModelEntry:
        """The entry called `name`; for a name nobody registered, the one trainable model, with a notice in the log.

        BackendError 404 lists the names where there is not exactly one trainable model."""
        if name in self._entries:
            return self._entries[name]
        trainable = [entry for entry in self._entries.values() if entry.trainable]
        if len(trainable) != 1:
            raise BackendError(
                f"no model is called {name!r}; the models here are: {', '.join(sorted(self._entries)) or 'none'}",
                status=404,
                code="model_not_found",
            )
        self._notice(name, trainable[0].name)
        return trainable[0]

    def _notice(self, asked: str, answered: str) -> None:
        if asked not in self._noticed and len(self._noticed) < 1000:  # names come from outside: bounded
            self._noticed.add(asked)
            _log.warning("no model is called %r: its calls are answered by the trainable model %r", asked, answered)
