"""The gateway as the rest of the house sees it: what answers calls, and gates to close while
weights change."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from agentlightning.errors import NotFoundError
from agentlightning.gateway.attribution import Attributor, Numbers
from agentlightning.gateway.calls import REMOVE_SECRETS, Calls
from agentlightning.gateway.gates import LONGEST_HOLD, Holding
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.recorder import CallStatistics
from agentlightning.gateway.serving import Serving
from agentlightning.prompts.replacing import Replacer
from agentlightning.prompts.watching import MetShare
from agentlightning.store.base import LightningStore
from agentlightning.store.redaction import Redact

_HOLD: Final = "hold"  # who holds where nobody else is named


class Gateway:
    """Answers calls of OpenAI's, Anthropic's and Google's protocols, and captures them into a
    store.

    The call of an attempt is durable before the end of its answer is sent. Recording a call that no
    attempt made never delays its answer, and what does not fit is counted. Without a store nothing
    is attributed or captured. With an `admin_key` every call needs a key. A request body above
    `body_limit` bytes is refused with 413. A call that is held waits for at most `longest_hold`
    seconds. With `numbers`, another process numbers the calls of attempts. `prompts` are put into
    the calls of whoever has no candidate of their own. Calls are compared with recorded ones as
    `redact`, which the store applies too, leaves them. `close` writes what is still queued."""

    def __init__(
        self,
        models: ModelTable,
        store: LightningStore | None = None,
        *,
        admin_key: str | None = None,
        body_limit: int = 32 * 1024 * 1024,
        longest_hold: float = LONGEST_HOLD,
        numbers: Numbers | None = None,
        prompts: Replacer | None = None,
        redact: Redact = REMOVE_SECRETS,
    ) -> None:
        self.models = models
        self._holding = Holding(store, models.gates, longest_hold)
        self.attributor = Attributor(store, admin_key=admin_key, numbers=numbers)
        self._calls = Calls(models, store, self.attributor, self._holding, prompts, redact)
        self.serving = Serving(self._calls, body_limit, attributed=store is not None)

    def keep_to_this_machine(
        self, key_of_session: Callable[[Mapping[str, str]], str | None]
    ) -> None:
        """From here on, where no admin key is set: answer only this machine's own programs (no page
        of elsewhere in a browser, nothing through a declared proxy), and holders of keys that were
        issued here. `key_of_session` says which key the cookie of a browser stands for, in the
        headers of a call."""
        self.attributor.local_only = True
        self.attributor.key_of_session = key_of_session

    def hold(self, name: str, seconds: float | None = None, holder: str = _HOLD) -> None:
        """New calls of this model wait from now on; running ones go on. Nothing is refused. After
        `seconds`, where given, calls are let through; a repeated call restarts them. Each `holder`
        holds by itself.

        NotFoundError for a name there is not."""
        self.hold_gate(self.entry(name).name, holder, seconds)

    def release(self, name: str, holder: str = _HOLD) -> None:
        """End what `hold` began for this holder: waiting and new calls pass, unless others hold
        them too. NotFoundError as above."""
        self.release_gate(self.entry(name).name, holder)

    @asynccontextmanager
    async def held(self, *names: str) -> AsyncGenerator[None]:
        """Hold calls of these models as long as the block lasts, whoever else holds them.
        NotFoundError as above."""
        names = tuple(self.entry(name).name for name in names)
        holder = secrets.token_hex(8)
        for name in names:
            self.hold_gate(name, holder)
        try:
            yield
        finally:
            for name in names:
                self.release_gate(name, holder)

    def hold_gate(self, name: str, holder: str, seconds: float | None = None) -> None:
        self.models.gate(name).hold(holder, seconds)
        self._holding.changed()

    def release_gate(self, name: str, holder: str) -> None:
        self.models.gate(name).release(holder)
        self._holding.changed()

    def entry(self, name: str) -> ModelEntry:
        """The model of this name or alias. NotFoundError where there is none."""
        entry = self.models.get(name)
        if entry is None:
            known = ", ".join(sorted(entry.name for entry in self.models)) or "none"
            raise NotFoundError(f"no model is called {name!r}; the models here are: {known}")
        return entry

    def turn_away(self) -> None:
        """Answer the calls that are held with 503: this process is about to end, and they would be
        cut off."""
        self._holding.turn_away()

    @property
    def statistics(self) -> CallStatistics:
        return self._calls.statistics

    @property
    def met(self) -> MetShare:
        """The share of calls that had a text of `prompts`."""
        return self._calls.met

    @property
    def running(self) -> int:
        return sum(gate.running for gate in self.models.gates())

    @property
    def shed(self) -> int:
        return 0 if self._calls.queue is None else self._calls.queue.shed

    async def close(self) -> None:
        await self._holding.close()
        if self._calls.queue is not None:
            await self._calls.queue.close()
        for entry in self.models:
            await entry.backend.close()
