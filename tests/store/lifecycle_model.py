"""What becomes of rollouts and attempts, once more and on one page: what the store is compared
with.

Written from the rules, not from the store: it knows no tables of moves, no SQL and no transactions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.types import RolloutConfig

LEASE = 30.0  # seconds
TERMINAL = {"succeeded", "failed", "cancelled"}
QUEUED = {"queuing", "requeuing"}


@dataclass
class AttemptModel:
    id: str
    token: int
    start: float
    heard: float
    lease: float
    status: str = "preparing"
    ended_at: float = 0.0
    spans: dict[str, int] = field(default_factory=dict)
    # from and until when calls of it are held back
    holds: list[tuple[float, float]] = field(default_factory=list)
    held_earlier: float = 0.0  # before the store was last opened, or the attempt was given up

    @property
    def active(self) -> bool:
        return self.status in ("preparing", "running")

    @property
    def held(self) -> float:
        return self.held_earlier + self.held_after(self.start)

    def release(self) -> None:
        self.held_earlier, self.holds = self.held, []

    def held_after(self, when: float) -> float:
        """Seconds after a time in which any call of it is held back."""
        seconds = 0.0
        for begin, end in sorted(self.holds):
            seconds += max(0.0, end - max(begin, when))
            when = max(when, end)
        return seconds


@dataclass
class RolloutModel:
    id: str
    config: RolloutConfig
    priority: int = 0
    group: tuple[str, int] | None = None
    status: str = "queuing"
    attempts: list[AttemptModel] = field(default_factory=list)

    def end(self, attempt: AttemptModel, status: str, now: float) -> None:
        attempt.status, attempt.ended_at = status, now
        attempt.release()
        if attempt is not self.attempts[-1] or self.status in TERMINAL:
            return
        if status in self.config.retry_condition and len(self.attempts) < self.config.max_attempts:
            self.status = "requeuing"
        else:
            self.status = status if status in TERMINAL else "failed"

    def decide(self, status: str, now: float) -> None:
        """Somebody sets it by hand: no attempt of it goes on."""
        self.status = status
        for attempt in self.attempts:
            if attempt.active:
                attempt.status, attempt.ended_at = (
                    "cancelled" if status == "requeuing" else status,
                    now,
                )

    def run(self, attempt: AttemptModel) -> None:
        attempt.status = "running"
        if attempt is self.attempts[-1] and self.status not in TERMINAL:
            self.status = "running"

    def revivable(self, attempt: AttemptModel) -> bool:
        return (
            attempt.status == "unresponsive"
            and attempt is self.attempts[-1]
            and self.status == "requeuing"
        )

    def timed_out(self, attempt: AttemptModel, now: float) -> bool:
        timeout = self.config.timeout_seconds
        return timeout is not None and attempt.start + timeout + attempt.held <= now

    def hear(self, attempt: AttemptModel, now: float) -> None:
        if self.revivable(attempt):
            attempt.lease = max(attempt.lease, now + LEASE)
            self.run(attempt)
        elif attempt.status == "preparing":
            self.run(attempt)
        if attempt.active:
            attempt.heard = now

    def beat(self, attempt: AttemptModel, now: float) -> None:
        if self.revivable(attempt) and attempt.ended_at >= attempt.lease:
            self.run(attempt)
        if attempt.active:
            attempt.lease = now + LEASE

    def hold(self, attempt: AttemptModel, now: float, seconds: float) -> None:
        if attempt.active:
            attempt.holds.append((now, now + seconds))

    def expire(self, now: float) -> None:
        for attempt in self.attempts:
            clocks = [(attempt.lease, "unresponsive")]
            if self.config.timeout_seconds:
                clocks.append(
                    (attempt.start + self.config.timeout_seconds + attempt.held, "timeout")
                )
            if self.config.unresponsive_seconds:
                silence = self.config.unresponsive_seconds + attempt.held_after(attempt.heard)
                clocks.append((attempt.heard + silence, "unresponsive"))
            when, status = min(clocks, key=lambda clock: clock[0])
            if attempt.active and when <= now:
                self.end(attempt, status, now)
