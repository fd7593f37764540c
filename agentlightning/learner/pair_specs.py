"""Where a run's policy is trained and sampled, as users write it in `learner` and `sampler`.

Imports no torch: impossible settings are refused before anything is loaded.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from agentlightning.data.functions import unwrapped
from agentlightning.errors import ConfigError

HOSTED: Final = "hosted"
START: Final = "start"

_ONE_PROCESS: Final = ("several models, or none", "deterministic", "lora", "a critic")
_ON_A_SERVER: Final = {
    "sampler": "the server that learns samples too",
    "a critic": "it trains no values",
    "reference": "it returns log-probabilities of the trained adapter only",
    "deterministic": "it batches calls as they arrive",
    "max_staleness": "some servers sample with the weights that they are training",
    "dtype": "the server chooses it",
    "device": "the server chooses it",
    "threads": "almost nothing is computed here",
    "gradient_checkpointing": "the server chooses it",
}

T = TypeVar("T", bound=msgspec.Struct)


class LearnerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where gradient steps are made; default: in the trainer's process.

    Settings: fsdp: a number of processes on this machine. tinker: base URL of a Tinker server, or
        `hosted`. verl: base URL of verl's Tinker server, which trains all weights of the one model
        it has. tokenizer: name or directory of the tokenizer, if it is not the model's. reduction:
        what a server divides its losses by: nothing (`sum`), or, as SkyRL's JAX backend does, the
        sequence's
            length and the number of sequences (`mean`).
    """

    fsdp: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tinker: str | None = None
    verl: str | None = None
    tokenizer: str | None = None
    reduction: Literal["sum", "mean"] | None = None

    @property
    def remote(self) -> bool:
        """Whether a Tinker server learns, and samples too."""
        return self.tinker is not None or self.verl is not None

    @property
    def url(self) -> str:
        return (self.verl or self.tinker or "").rstrip("/")


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a policy is sampled.

    Settings: vllm, sglang: base URL of a server, or of several equal ones. `start` (vLLM only)
        starts a server that ends with
            the run.
        model: the server's name for it, if it serves several.
        api_key: the server's key.
        program, flags, environment: of a started vLLM: its command, and additional flags and
        variables."""

    vllm: str | list[str] | None = None
    sglang: str | list[str] | None = None
    model: str | None = None
    api_key: str | None = None
    program: str | None = None
    flags: list[str] = []
    environment: dict[str, str] = {}

    @property
    def kind(self) -> Literal["vllm", "sglang"]:
        return "vllm" if self.vllm else "sglang"

    @property
    def starts(self) -> bool:
        return self.vllm == START

    @property
    def urls(self) -> list[str]:
        given = self.vllm or self.sglang or []
        return [given] if isinstance(given, str) else given


_LEARNERS: Final = (
    "write torch, {fsdp: 2} for a learner in two processes, tinker, {tinker: URL} or {verl: URL}"
)
_SAMPLERS: Final = (
    "write embedded, vllm, {vllm: http://host:8000/v1} or {sglang: http://host:30000/v1}"
)


def read_learner(given: str | Mapping[str, Any] | None) -> LearnerSpec:
    """ConfigError if it is not a place."""
    words = {"torch": {}, "tinker": {"tinker": HOSTED}}
    place = _read("learner", given, words, LearnerSpec, _LEARNERS)
    named = [name for name in ("fsdp", "tinker", "verl") if getattr(place, name) is not None]
    if len(named) > 1 or (given and not isinstance(given, str) and not named):
        raise ConfigError(f"learner names {', '.join(named) or 'no place'}; {_LEARNERS}")
    if place.remote and place.url != HOSTED and not _is_url(place.url):
        raise ConfigError(
            f"learner: {place.url!r} is not a Tinker server's URL: write http://host:port, or "
            "hosted"
        )
    if place.reduction and place.tinker is None:
        raise ConfigError("learner: reduction is for other Tinker servers; verl's sums its losses")
    return place


def read_sampler(given: str | Mapping[str, Any] | None) -> SamplerSpec | None:
    """None for the engine in the trainer's process. ConfigError if it is not a place."""
    if given in (None, "embedded"):
        return None
    place = _read("sampler", given, {"vllm": {"vllm": START}}, SamplerSpec, _SAMPLERS)
    if len([kind for kind in (place.vllm, place.sglang) if kind]) != 1:
        raise ConfigError(f"sampler names both or neither of vllm and sglang; {_SAMPLERS}")
    if not place.starts and not all(map(_is_url, place.urls)):
        raise ConfigError(f"sampler: {', '.join(place.urls)} is not a server's URL; {_SAMPLERS}")
    if not place.starts and (place.flags or place.environment or place.program):
        raise ConfigError(
            "sampler: program, flags and environment are for a started server: {vllm: start, …}"
        )
    if place.starts and place.api_key:
        raise ConfigError(
            "sampler: api_key belongs to a server given by URL; a started server needs none"
        )
    if (place.starts or place.sglang) and place.model:
        raise ConfigError("sampler: this server has one model: leave `model` out")
    return place


def _read(name: str, given: Any, words: Mapping[str, Any], kind: type[T], forms: str) -> T:
    if isinstance(given, str) and given not in words:
        raise ConfigError(f"{name} is {given!r}; {forms}")
    try:
        return msgspec.convert(words[given] if isinstance(given, str) else given or {}, kind)
    except msgspec.ValidationError as error:  # its text contains no values, such as the key
        what, _, key = str(error).partition(" - at `$")
        raise ConfigError(
            f"{name}{key.rstrip('`')}: {what[0].lower()}{what[1:]}; {forms}"
        ) from None


def _is_url(text: str) -> bool:
    return urlsplit(text).scheme in ("http", "https")


def check_combination(learner: LearnerSpec, sampler: SamplerSpec | None, **settings: Any) -> None:
    """ConfigError for settings of a run that do not go with its places. `settings` have users'
    names; None, False and 0 mean not set, and `models` is a number."""
    given = {name for name, value in settings.items() if value}
    if settings.get("models", 1) != 1:
        given.add("several models, or none")

    def refuse(what: str, reasons: Mapping[str, str]) -> None:
        for name in [name for name in reasons if name in given]:
            raise ConfigError(f"{what} goes without {name}: {reasons[name]}")

    if sampler is not None:
        alone = "it serves only the trained model"
        batches = "servers batch calls as they arrive; the embedded sampler does not"
        refuse("a sampler by URL", {"several models, or none": alone, "deterministic": batches})
        if sampler.sglang:
            refuse(
                "SGLang", {"max_staleness": "it cannot pause calls for new weights, as vLLM does"}
            )
    if learner.fsdp is not None:
        refuse(
            "learner: fsdp",
            dict.fromkeys(_ONE_PROCESS, "it trains all weights of one model: use learner: torch"),
        )
        for name in ("loss", "aggregation"):
            _check_importable(name, settings.get(name))
    if learner.remote:
        if sampler is not None:
            given.add("sampler")
        refuse("learner: a Tinker server", _ON_A_SERVER)
        if learner.url == HOSTED and not os.environ.get("TINKER_API_KEY"):
            raise ConfigError(
                "learner: the hosted Tinker service needs a key in the variable TINKER_API_KEY"
            )


def _check_importable(name: str, function: Any) -> None:
    try:
        pickle.dumps(function)
        at_home = getattr(unwrapped(function), "__module__", None) == "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        at_home = True
    if at_home:
        raise ConfigError(
            f"the {name} {function!r} cannot be imported by the processes of the learner: define "
            "it at the top level of a module, or name it: 'file.py:function'"
        )
