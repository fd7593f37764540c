"""The log-probabilities that a teacher gives to what a student sampled: of a model in this process, or of a server.

Knows models, and the routes of vLLM and SGLang that score a prompt. Knows no algorithm.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import aiohttp
import msgspec
import numpy as np

from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from agentlightning.data.token_bytes import TokenBytes

# float32[N] of each sequence, a number for each of its sampled tokens. Blocks.
Teacher: TypeAlias = Callable[[Sequence[TrainingSequence]], Sequence[FloatArray]]

_AT_ONCE: Final = 16  # requests
_RETRIES: Final = 3
_PROBE: Final = "def f(x):\n    return x + 12345  # naïve café, 北京 🙂\n\n\tThe quick brown fox?!"


class TeacherServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base URL of a `vllm` or of an `sglang` server. `model` is the server's name for the teacher, where it serves
    several; `api_key` its key."""

    vllm: str | None = None
    sglang: str | None = None
    model: str | None = None
    api_key: str | None = None

    @property
    def root(self) -> str:
        return (self.vllm or self.sglang or "").rstrip("/").removesuffix("/v1")


def read_teacher(given: Any) -> Any:
    """What says where a teacher is: a `TeacherServer`, or what a model is opened from. ConfigError for neither."""
    forms = "give a model's path or id, {vllm: http://host:8000/v1} or {sglang: http://host:30000}"
    if isinstance(given, str) and "://" in given:
        given = {"vllm": given}
    if not isinstance(given, Mapping):
        if given is None or given == "":
            raise ConfigError(f"teacher is missing: {forms}")
        return given
    try:
        server = msgspec.convert(given, TeacherServer)
    except msgspec.ValidationError as error:
        raise ConfigError(f"teacher: {error}; {forms}") from None
    if (server.vllm is None) == (server.sglang is None) or "://" not in server.root:
        raise ConfigError(f"teacher names no one server; {forms}")
    return server


def open_teacher(given: Any, student: TokenBytes | None) -> Teacher:
    """The teacher that `read_teacher` accepts, for a student with these tokens. Blocks, as a model is loaded.

    ConfigError where there is none, or where its tokenizer has other ids than the student's."""
    given = read_teacher(given)
    if isinstance(given, TeacherServer):
        return asyncio.run(_RemoteTeacher.open(given, student))
    return _local_teacher(given, student)


# --- a model in this process --------------------------------------------------------------------------------------


def _local_teacher(source: Any, student: TokenBytes | None) -> Teacher:
    from agentlightning.learner.policy import Policy, choose_device, open_policy
    from agentlightning.learner.torch import TorchLearner

    if not isinstance(source, str | Path | Policy):
        raise ConfigError(f"teacher is {source!r}; give a model's path or id, or an agl.Policy")
    dtype = "bfloat16" if choose_device().startswith("cuda") and not isinstance(source, Policy) else None
    policy = open_policy(source, seed=0, dtype=dtype)
    known = policy.token_bytes
    if student is not None and known is not None:
        ids, other = student.tokenizer.get_vocab(), known.tokenizer.get_vocab()
        if odd := next((token for token, number in ids.items() if other.get(token) != number), None):
            raise ConfigError(
                f"the teacher's tokenizer has another id for {odd!r} ({other.get(odd)}, the student's {ids[odd]}): "
                "a teacher reads the student's own token ids, so take one of the same family"
            )
    learner = TorchLearner(policy)
    return lambda sequences: [one.numpy() for one in learner.logprobs(sequences)]


# --- a server -----------------------------------------------------------------------------------------------------


class _RemoteTeacher:
    def __init__(self, server: TeacherServer, model: str | None) -> None:
        self._server = server
        self._model = model

    @classmethod
    async def open(cls, server: TeacherServer, student: TokenBytes | None) -> _RemoteTeacher:
        teacher = cls(server, server.model)
        try:
            async with teacher._session() as session:
                if teacher._model is None:
                    async with session.get(f"{server.root}/v1/models") as answer:
                        listed = await _read(answer)
                    teacher._model = str(listed["data"][0]["id"])
                ids = [1, 2, 3] if student is None else student.tokenizer.encode(_PROBE, add_special_tokens=False).ids
                if student is not None:
                    await teacher._check_tokenizer(session, ids)
                found = await teacher._score(session, ids)
        except (BaseExceptionGroup, TrainingError, aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
            raise ConfigError(f"teacher: {server.root} cannot score what is sampled: {_why(error)}") from None
        if not np.isfinite(found[1:]).all():
            raise ConfigError(f"teacher: {server.root} gives log-probabilities that are no numbers")
        return teacher

    def __call__(self, sequences: Sequence[TrainingSequence]) -> list[FloatArray]:
        return asyncio.run(self._score_all(sequences))

    def _session(self) -> aiohttp.ClientSession:
        key = self._server.api_key
        return aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=300.0, sock_connect=10.0),
            connector=aiohttp.TCPConnector(limit=_AT_ONCE),
        )

    async def _score_all(self, sequences: Sequence[TrainingSequence]) -> list[FloatArray]:
        async with self._session() as session:

            async def of_one(sequence: TrainingSequence) -> FloatArray:
                found = await self._patiently(session, sequence.token_ids.tolist())
                return found[sequence.positions]

            return await asyncio.gather(*map(of_one, sequences))

    async def _patiently(self, session: aiohttp.ClientSession, ids: list[int]) -> FloatArray:
        for wait in itertools.count():
            try:
                return await self._score(session, ids)
            except (aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
                if wait == _RETRIES:
                    told = f"the teacher at {self._server.root} does not answer: {_why(error)}"
                    raise TrainingError(f"{told}. What was learned is saved: --resume goes on") from None
                await asyncio.sleep(2.0**wait)
        raise AssertionError

    async def _score(self, session: aiohttp.ClientSession, ids: list[int]) -> FloatArray:
        """Of each token, its log-probability after those before; of the first, NaN."""
        if self._server.vllm is not None:
            asked = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
            async with session.post(f"{self._server.root}/v1/completions", json=asked) as answer:
                told = (await _read(answer))["choices"][0]["prompt_logprobs"]
            found = [one[str(token)]["logprob"] for one, token in zip(told[1:], ids[1:], strict=True)]
        else:
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            async with session.post(f"{self._server.root}/generate", json=asked) as answer:
                told = (await _read(answer))["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in told] != ids:
                raise TrainingError("it scored other tokens than it was given")
            found = [logprob for logprob, *_ in told[1:]]
        return np.array([np.nan, *found], np.float32)

    async def _check_tokenizer(self, session: aiohttp.ClientSession, ids: list[int]) -> None:
        asked = {"model": self._model, "prompt": _PROBE, "add_special_tokens": False}
        async with session.post(f"{self._server.root}/tokenize", json=asked) as answer:
            if answer.status == 404:  # what has no such route is compared by nobody
                return
            told = (await _read(answer))["tokens"]
        if told != ids:
            raise TrainingError(
                f"its tokenizer gives other ids than the student's ({told[:5]} …, not {ids[:5]} …): take a teacher of "
                "the same family"
            )


async def _read(answer: aiohttp.ClientResponse) -> Any:
    """TrainingError for what asking again does not mend."""
    body = await answer.read()
    if answer.status >= 500:
        raise aiohttp.ClientError(f"it answered {answer.status}")
    if answer.status >= 400:
        raise TrainingError(f"it answered {answer.status}: {body[:300].decode(errors='replace')}")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise TrainingError("it does not answer in JSON") from None


def _why(error: BaseException) -> str:
    if isinstance(error, LookupError | TypeError):
        return "its answers have no log-probabilities of the prompt"
    return str(error) or type(error).__name__
