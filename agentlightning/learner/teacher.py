"""A teacher's log-probabilities of the tokens that a student sampled, from a model in this process
or a server.

Knows models, and how vLLM scores a prompt; no algorithm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np

from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import BackendError, ConfigError, TrainingError

if TYPE_CHECKING:
    from agentlightning.data.token_bytes import TokenBytes
    from agentlightning.gateway.backends.connection import BackendConnection

# Returns float32[N] per sequence, one value per sampled token. Blocks.
Teacher: TypeAlias = Callable[[Sequence[TrainingSequence]], Sequence[FloatArray]]

_AT_ONCE: Final = 16  # simultaneous requests
_PROBE: Final = "def f(x):\n    return x + 12345  # naïve café, 北京 🙂\n\n\tThe quick brown fox?!"


class TeacherServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base URL of a `vllm` server. `model` is its name for the teacher, if it serves several;
    `api_key` its key."""

    vllm: str
    model: str | None = None
    api_key: str | None = None


def read_teacher(given: Any) -> Any:
    """A `TeacherServer`, or the source of a model to open. ConfigError if it is neither."""
    forms = "give a model's path or id, or {vllm: http://host:8000/v1}"
    if not given:
        raise ConfigError(f"teacher is missing: {forms}")
    if isinstance(given, str) and "://" in given:
        given = {"vllm": given}
    if not isinstance(given, Mapping):
        return given
    try:
        server = msgspec.convert(given, TeacherServer)
    except msgspec.ValidationError as error:
        raise ConfigError(f"teacher: {error}; {forms}") from None
    if "://" not in server.vllm:
        raise ConfigError(f"teacher names no server; {forms}")
    return server


def open_teacher(given: Any, student: TokenBytes | None) -> Teacher:
    """The teacher described by `read_teacher`'s result, for a student with these tokens. Blocks
    while a model is loaded.

    ConfigError if it cannot be opened, or if its tokenizer has other ids than the student's."""
    given = read_teacher(given)
    if not isinstance(given, TeacherServer):
        return _local_teacher(given, student)
    try:
        server = asyncio.run(_checked_server(given, student))
    except (BackendError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"teacher: {given.vllm} cannot score sampled tokens: {_reason(error)}"
        ) from None
    return lambda sequences: asyncio.run(_score_all(server, sequences))


def _local_teacher(source: Any, student: TokenBytes | None) -> Teacher:
    from agentlightning.learner.policy import Policy, choose_device, open_policy
    from agentlightning.learner.torch import TorchLearner

    if not isinstance(source, str | Path | Policy):
        raise ConfigError(f"teacher is {source!r}; give a model's path or id, or an agl.Policy")
    dtype = (
        "bfloat16"
        if choose_device().startswith("cuda") and not isinstance(source, Policy)
        else None
    )
    policy = open_policy(source, seed=0, dtype=dtype)
    known = policy.token_bytes
    if student is not None and known is not None:
        ids = student.tokenizer.get_vocab()
        other = known.tokenizer.get_vocab()
        if odd := next(
            (token for token, number in ids.items() if other.get(token) != number), None
        ):
            raise ConfigError(
                f"the teacher's tokenizer has another id for {odd!r} ({other.get(odd)}, the "
                f"student's {ids[odd]}): a teacher reads the student's own token ids, so take one "
                "of the same family"
            )
    learner = TorchLearner(policy)
    return lambda sequences: [logprob.numpy() for logprob in learner.logprobs(sequences)]


def _connected(server: TeacherServer) -> BackendConnection:
    from agentlightning.gateway.backends.connection import BackendConnection

    root = server.vllm.rstrip("/").removesuffix("/v1")
    return BackendConnection(f"{root}/v1", api_key=server.api_key, timeout_seconds=300.0)


async def _checked_server(server: TeacherServer, student: TokenBytes | None) -> TeacherServer:
    """The server with its model's name, if it tokenizes and scores as needed."""
    connection = _connected(server)
    try:
        if server.model is None:
            listed = await _ask(connection, "v1/models", None)
            server = msgspec.structs.replace(server, model=str(listed["data"][0]["id"]))
        ids = [1, 2, 3]
        if student is not None:
            ids = student.tokenizer.encode(_PROBE, add_special_tokens=False).ids
            asked = {"model": server.model, "prompt": _PROBE, "add_special_tokens": False}
            try:
                theirs = (await _ask(connection, "tokenize", asked))["tokens"]
            except BackendError as error:
                if error.status != 404:
                    raise
                theirs = ids  # without this route, ids are not compared
            if theirs != ids:
                raise ValueError(
                    f"its tokenizer gives other ids than the student's ({theirs[:5]} …, not "
                    f"{ids[:5]} …): take a teacher of the same family"
                )
        if not np.isfinite((await _score(server, connection, ids))[1:]).all():
            raise ValueError("it gives log-probabilities that are not numbers")
        return server
    finally:
        await connection.close()


async def _score_all(
    server: TeacherServer, sequences: Sequence[TrainingSequence]
) -> list[FloatArray]:
    """TrainingError if the server fails to score a sequence."""
    connection = _connected(server)
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def score(sequence: TrainingSequence) -> FloatArray:
        async with at_once:
            found = await _score(server, connection, sequence.token_ids.tolist())
        return found[sequence.positions]

    try:
        return await asyncio.gather(*map(score, sequences))
    except (BackendError, LookupError, TypeError, ValueError) as error:
        problem = f"the teacher at {server.vllm} does not answer: {_reason(error)}"
        raise TrainingError(f"{problem}. What was learned is saved: --resume continues") from None
    finally:
        await connection.close()


async def _score(
    server: TeacherServer, connection: BackendConnection, ids: list[int]
) -> FloatArray:
    """The log-probability of each token given those before it; NaN for the first."""
    asked = {
        "model": server.model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 1,
    }
    answer = (await _ask(connection, "v1/completions", asked))["choices"][0]["prompt_logprobs"]
    found = [
        logprobs[str(token)]["logprob"] for logprobs, token in zip(answer[1:], ids[1:], strict=True)
    ]
    return np.array([np.nan, *found], np.float32)


async def _ask(connection: BackendConnection, route: str, asked: Any) -> Any:
    """A POST, or a GET without a body. BackendError if refused."""
    body = None if asked is None else msgspec.json.encode(asked)
    async with connection.posted(f"{connection.root}/{route}", body, accepted=True) as answer:
        return msgspec.json.decode(await answer.read())


def _reason(error: BaseException) -> str:
    if isinstance(error, LookupError | TypeError):
        return "its answers have no log-probabilities of the prompt"
    return str(error) or type(error).__name__
