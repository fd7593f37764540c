"""`command`: makes a program in any language an agent.

The program gets its task on stdin and in its arguments, and its model, reward URL and OpenTelemetry
settings in its environment. It leads a session of its own, so that it can be ended with everything
it started. POSIX only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError, nearest
from agentlightning.runner.agent import LitAgent, RolloutRawResult, is_async, pick_resource
from agentlightning.runner.environment import (
    agent_environment,
    current_server,
    inherited_environment,
)
from agentlightning.runner.execution import in_own_thread
from agentlightning.runner.instrumented import instrumenting
from agentlightning.runner.own_folder import own_folder
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.attributes import to_json
from agentlightning.tracing.context import current_binding
from agentlightning.tracing.logs import Excerpt, LogStream, record_log
from agentlightning.tracing.rewards import parse_reward
from agentlightning.types import LLM, AttemptedRollout, NamedResources

RewardSource: TypeAlias = Literal["auto", "stdout"]

_FIELD: Final = re.compile(r"\{task((?:\[[^\]{}]+\]|\.\w+)*)\}")
_STEP: Final = re.compile(r"\[([^\]]+)\]|\.(\w+)")
_SHELL: Final = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1"})
_SHOWN: Final = 2000  # characters of stderr in the reason of a failure
_PIPE_BYTES: Final = 65536
# between SIGTERM and SIGKILL; less than a runner waits for a cancelled agent
GRACE_SECONDS: Final = 3.0


class CommandFailedError(AgentLightningError):
    """The program was killed, or exited with a status other than 0."""


@dataclass(frozen=True)
class CommandOutput:
    """The output of a program, and the directory it ran in. Of long outputs, `stdout` and `stderr`
    have the beginning and the end."""

    stdout: str
    stderr: str
    directory: Path = Path()


Grader: TypeAlias = Callable[[Any, CommandOutput], Any]


def command(
    line: str | os.PathLike[str] | Sequence[str],
    *,
    reward: RewardSource = "auto",
    grader: Grader | str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> CommandAgent:
    """An agent that runs a program: `command("python my_agent.py --question {task[question]}",
    reward="stdout")`.

    `line` is split as a shell would, unless it is a list of words or a path; no shell runs it.
    `{task}` becomes the task (text unchanged, else JSON), `{task[key]}` and `{task.key}` a field of
    it, each within one argument. stdin is the task as JSON.

    `reward="stdout"` reads the last line of stdout; `"auto"` takes a last line that is an object
    with `reward` or `primary_key`, or else what was posted to `AGL_REWARD_URL`. A `grader` decides
    instead: a function (sync or async) of the task and a `CommandOutput`, or a command that reads
    both as JSON on stdin and prints the reward last.

    `env` adds variables, with fields of the task as in `line`; `cwd` is the working directory. The
    beginning and end of stdout and stderr become the attempt's logs. ConfigError for a line that
    cannot be run."""
    if reward not in get_args(RewardSource):
        raise ConfigError(f"reward is {reward!r}; {nearest(reward, get_args(RewardSource))}")
    if grader is not None and reward != "auto":
        raise ConfigError(
            f"the reward is either the grader's or read from {reward!r}; leave one of them out"
        )
    if isinstance(line, os.PathLike):
        line = [os.fspath(line)]
    line = line if isinstance(line, str) else shlex.join(line)
    return CommandAgent(Program(line, dict(env or {}), Path(cwd or ".").absolute()), reward, grader)


@dataclass
class Program:
    """A command line with placeholders for the task, its variables and its working directory."""

    line: str
    env: dict[str, str]
    cwd: Path | None

    def __post_init__(self) -> None:
        try:
            self._words = shlex.split(self.line)
        except ValueError as error:
            raise ConfigError(
                f"the command {self.line!r} cannot be split into words: {error}"
            ) from None
        if not self._words:
            raise ConfigError("the command is empty; give a program and its arguments")
        if shell := _SHELL.intersection(self._words):
            raise ConfigError(
                f"the command has {min(shell)!r}, but no shell runs it; write: sh -c '… "
                f"{min(shell)} …' if one should"
            )
        is_shell = Path(self._words[0]).name in ("sh", "bash", "dash", "zsh", "ksh")
        if is_shell and any(
            a == "-c" and _FIELD.search(b)
            for a, b in zip(self._words, self._words[1:], strict=False)
        ):
            raise ConfigError(
                "the task in a shell's script would be run as code; write: sh -c 'agent.py "
                '"$1"\' sh {task}'
            )

    def check(self) -> None:
        """ConfigError if the program does not exist."""
        if self.cwd is not None and not self.cwd.is_dir():
            raise ConfigError(f"cwd is {str(self.cwd)!r}, which is no directory")
        name = self._words[0]
        if _FIELD.search(name):
            return
        place = str((self.cwd or Path()) / name) if os.sep in name else name
        if shutil.which(place, path=self.env.get("PATH")) is None:
            what = "is not there" if place != name else "is not on the PATH"
            what = "is not executable (chmod +x)" if os.path.isfile(place) else what
            raise ConfigError(f"the command's program {place!r} {what}")

    def setting(
        self, variables: Mapping[str, str], own: Path
    ) -> tuple[dict[str, str], Path | None]:
        """Its variables and its working directory; `own` is an empty directory of the attempt."""
        return {**inherited_environment(), **variables}, self.cwd

    async def run(
        self, task: Any, stdin: str, variables: Mapping[str, str], what: str, own: Path
    ) -> CommandOutput:
        """Run it on a task; its output is logged however it ends. CommandFailedError if it
        fails."""
        environment, directory = await in_own_thread(lambda: self.setting(variables, own))
        arguments = [_filled(word, task) for word in self._words]
        given = {name: _filled(value, task) for name, value in self.env.items()}
        with closing(Output("stdout")) as stdout, closing(Output("stderr")) as stderr:
            try:
                exit_code = await execute(
                    arguments,
                    (stdout, stderr),
                    stdin=stdin.encode(),
                    environment=environment | given,
                    directory=directory,
                )
            finally:
                taken = [stdout.taken(), stderr.taken()]
                output = CommandOutput(taken[0].text(), taken[1].text(), directory or Path())
                if binding := current_binding():
                    for stream, excerpt in zip((stdout, stderr), taken, strict=True):
                        record_log(binding.tracer, stream.name, excerpt.text(), excerpt.times)
        if exit_code:
            raise CommandFailedError(
                _failure(what, exit_code, output.stderr.strip() or output.stdout.strip())
            )
        return output


class CommandAgent(LitAgent[Any]):
    """The agent that `command` makes: a program and the source of its reward."""

    def __init__(
        self, program: Program, reward: RewardSource, grader: Grader | Program | str | None
    ) -> None:
        self._program = program
        self._source = reward
        self._grader = replace(program, line=grader) if isinstance(grader, str) else grader

    def own_copy(self) -> CommandAgent:
        return self  # a program keeps nothing here

    def check(self) -> None:
        """ConfigError if a program does not exist."""
        self._program.check()
        if isinstance(self._grader, Program):
            self._grader.check()

    def takes_prompts(self) -> bool:
        return False

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run the program on the task and return its reward; None if it posted its reward itself,
        or has none."""
        with own_folder(rollout) as own:
            variables = self._variables(resources, rollout)
            output = await self._program.run(task, _line(task), variables, "the command", own)
            if self._grader is not None:
                return await self._graded(self._grader, task, output, own)
            return self._reward(_last_line(output))

    def _variables(self, resources: NamedResources, rollout: AttemptedRollout) -> dict[str, str]:
        any_llm = any(isinstance(resource, LLM) for resource in resources.values())
        llm = pick_resource(resources, "llm", LLM) if any_llm else None
        server = current_server.get()
        if server is None and llm is not None and llm.gateway:
            server = llm.endpoint.partition("/rollout/")[0]
        may_give = self._source == "auto" and self._grader is None
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        reward_key = rollout.reward_key if may_give else None  # else an agent could grade itself
        variables = agent_environment(
            llm, *ids, server, rollout.api_key or "none", reward_key=reward_key
        )
        return variables | instrumenting()

    def _reward(self, line: str) -> RolloutRawResult:
        """The reward in the last line. `auto` takes only an object that names a reward: an answer
        of 42 is no reward of 42."""
        if self._source == "auto":
            try:
                value = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                return None
            if not isinstance(value, dict) or not {"reward", "primary_key"} & value.keys():
                return None
        return parse_reward(line, "the last line of the command's stdout")._asdict()

    async def _graded(
        self, grader: Grader | Program, task: Any, output: CommandOutput, own: Path
    ) -> Any:
        if isinstance(grader, Program):
            given = {"task": task, "stdout": output.stdout, "stderr": output.stderr}
            given["directory"] = str(output.directory.resolve())
            graded = await grader.run(task, _line(given), {}, "the grader's command", own)
            return parse_reward(
                _last_line(graded), "the last line of the grader's stdout"
            )._asdict()
        if is_async(grader):
            return await grader(task, output)
        return await in_own_thread(lambda: grader(task, output))


def _filled(text: str, task: Any) -> str:
    return _FIELD.sub(lambda found: _field(task, found[1]), text)


def _field(task: Any, path: str) -> str:
    """The text of a task, or of its part at `path`: a sequence of `[key]` and `.key`."""
    value = task
    for step in _STEP.finditer(path):
        key = step[1] or step[2]
        if isinstance(value, Mapping) and key in value:
            value = cast("Mapping[str, Any]", value)[key]
        elif (
            isinstance(value, list) and key.isdecimal() and int(key) < len(cast("list[Any]", value))
        ):
            value = cast("list[Any]", value)[int(key)]
        else:
            have = (
                nearest(key, map(str, cast("Mapping[Any, Any]", value)))
                if isinstance(value, Mapping)
                else ""
            )
            raise ConfigError(
                f"the command names {{task{path}}}, but the task has no {key!r}; {have}".rstrip(
                    "; "
                )
            )
    return value if isinstance(value, str) else to_json("the task", value)


def _line(value: Any) -> str:
    return to_json("the task", value) + "\n"


def _last_line(output: CommandOutput) -> str:
    return output.stdout.rstrip().rpartition("\n")[2]


def _failure(what: str, exit_code: int, text: str) -> str:
    if exit_code < 0:
        how = f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    else:
        how = f"exited with status {exit_code}"
    end = text_without_secrets(text)[-_SHOWN:]  # half a key looks like none
    last = end.rpartition("\n")[2]
    return (
        f"{what} {how}: {last}\n{end}"
        if end
        else f"{what} {how} and wrote nothing to stderr or stdout"
    )


# --- processes ------------------------------------------------------------------------------------


class Output:
    """One output stream of a program. It is read as it is written, so that nothing blocks, and kept
    in part."""

    def __init__(self, name: LogStream) -> None:
        self.name: LogStream = name
        self._excerpt = Excerpt()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._open = self._write_end_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._take)

    def taken(self) -> Excerpt:
        """The output since the last call, including what is still in the pipe."""
        self._take()
        excerpt = self._excerpt
        self._excerpt = Excerpt()
        return excerpt

    def close_write_end(self) -> None:
        """Close our end: from now on only the program can write."""
        if self._write_end_open:
            self._write_end_open = False
            os.close(self.write_end)

    def close(self) -> None:
        """Read what is in the pipe now, and nothing later."""
        self.close_write_end()
        self._take()
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)

    def _take(self) -> None:
        if self._open:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._read_end, _PIPE_BYTES)
                self._excerpt.write(data)
                if not data:  # nobody has the other end any more
                    self._loop.remove_reader(self._read_end)


@dataclass
class Executable:
    """A running program. `exited` has its exit code, which is minus the signal that ended it."""

    process: asyncio.subprocess.Process
    outputs: Sequence[Output]
    exited: asyncio.Future[int]

    @classmethod
    async def start(
        cls, arguments: Sequence[str], outputs: Sequence[Output], **options: Any
    ) -> Executable:
        """Start the program with stdout and stderr to `outputs`; `options` are those of
        `asyncio.create_subprocess_exec`, whose errors are raised. If it cannot start, `outputs` are
        closed."""
        stdout, stderr = (output.write_end for output in outputs)
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdout=stdout, stderr=stderr, start_new_session=True, **options
            )
        except BaseException:  # cancelled, too
            for output in outputs:
                output.close()
            raise
        for output in outputs:
            output.close_write_end()
        return cls(process, outputs, asyncio.ensure_future(process.wait()))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and its process group."""
        # nobody is left; macOS says so of zombies
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    async def end(self, grace_seconds: float) -> None:
        """End the program and its group: SIGTERM, and after `grace_seconds` SIGKILL for the
        rest."""
        try:
            if not self.exited.done():
                self.signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=grace_seconds)
        finally:
            self.signal(signal.SIGKILL)
            for output in self.outputs:
                output.close()
        await asyncio.wait({self.exited})


async def execute(
    arguments: Sequence[str],
    outputs: Sequence[Output],
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    directory: Path | None,
) -> int:
    """Run a program and return its exit code, or minus the signal that ended it. ConfigError if it
    cannot start.

    When it has exited, the rest of its process group is killed. If the awaiting task is cancelled,
    the group gets SIGTERM and, `GRACE_SECONDS` later, SIGKILL. Only a grandchild in a session of
    its own escapes. If it could not start, the caller closes `outputs`."""
    if directory is not None:
        # Some programs believe it rather than ask.
        environment = {**environment, "PWD": str(directory)}
    # Not a pipe: programs may open /dev/stdin, seek in it, or leave it unread.
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        try:
            program = await Executable.start(
                arguments, outputs, stdin=given, env=environment, cwd=directory
            )
        except (OSError, ValueError) as error:
            # no such program, too long an argument, a NUL in one
            raise ConfigError(f"the program {arguments[0]!r} cannot be started: {error}") from None
    try:
        return await asyncio.shield(program.exited)
    finally:
        await program.end(GRACE_SECONDS)
