"""Runs the blocks of a documentation page in order, in one folder: shell, Python, run files,
programs; and compares the figures that the page prints with those of the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("bash", "sh", "console", "")
NAMED = re.compile(r"(?:#|//) (?P<name>[\w.]+\.(?:py|sh|mjs|yaml))\b(?!,)")
SERVERS = re.compile(r"\bagl (serve|server|ui)\b(?!.*--gateway-of)")
BESIDE = re.compile(r"\bagl runner\b|--gateway-of\b|--watch\b|\brollouts tail\b|--n-runners 0\b")
ENDED = (0, 130, -signal.SIGTERM, 128 + signal.SIGTERM)


# Lines of a page whose figures are compared with the run's, and how far these may be apart.
FIGURES = {
    re.compile(r"Held-out reward: (\d+\.\d+)(?: before, (\d+\.\d+) after)?"): 0.15,
    re.compile(r"wrote ([\d,]+) conversations of [\d,]+ rollouts"): 15,
    re.compile(r"wrote [\d,]+ conversations of ([\d,]+) rollouts"): 0,
}

# Runs blocks of Python, one JSON string a line, with the same names.
SESSION = """
import ast, asyncio, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    place, source = json.loads(line)
    try:
        code = compile(source, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        left = eval(code, names)
        if left is not None:
            asyncio.run(left)
    except BaseException:
        problem = traceback.format_exc()
    else:
        problem = ""
    print(f"\\0{json.dumps(problem)}", flush=True)
"""


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    body: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, without the indentation of a list or a tab."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        body = re.sub(rf"^{found['indent']}", "", found["body"], flags=re.MULTILINE)
        yield Block(page, text.count("\n", 0, found.start()) + 1, found["language"], body)


def shell_lines(block: Block) -> Iterator[str]:
    """The commands of a shell's block: its logical lines, or those behind a prompt where there is
    one."""
    prompted = block.language in ("", "console")
    shown = re.findall(r"^\$ (.+)\n(error: )?", block.body, re.MULTILINE) if prompted else []
    lines = [f"! {line}" if error else line for line, error in shown]
    if not prompted:
        quoted = False  # a quotation that spans lines keeps them together
        for line in block.body.replace("\\\n", " ").splitlines():
            lines[-1:] = [f"{lines[-1]}\n{line}"] if quoted else [*lines[-1:], line]
            quoted ^= bool(line.split(" #")[0].count("'") % 2)
    for line in lines:
        if line.strip() and not line.startswith("#"):
            yield line


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Page:
    """One page's folder, its shell variables, its Python names, and the programs that run beside
    it."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        stand_ins: Mapping[str, str | Callable[[], str]],
        skipped: Mapping[str, str],
    ) -> None:
        self.folder, self.stand_ins, self.skipped = folder, stand_ins, skipped
        # stand-ins that make a training short: its figures are not the page's
        self.shorter: Mapping[str, str] = {}
        self.is_shortened = False
        self.printed = ""
        self._session: subprocess.Popen[str] | None = None
        self.beside: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.unused = set(skipped)
        self._state = folder / ".state"
        self._path = str(folder)
        self._environment = {**environment, "HOME": str(folder)}
        self._state.write_text(f"cd {shlex.quote(str(folder))}\n")

    def run(self, block: Block) -> None:
        if block.language == "python":
            self.python(block)
        elif block.language == "yaml":
            self.run_file(block)
        elif block.language == "javascript" or "AGL_REWARD_URL" in block.body:
            self.program(block)
        elif block.language in SHELLS:
            for line in shell_lines(block):
                self.shell(line, block.place)
            self.finish(SERVERS)
            if block.language == "" and not self.is_shortened:
                self.compare(block)
            if self.here.is_relative_to(self.folder / "examples"):
                self.output(f"echo cd {shlex.quote(str(self.folder))} >> {self._state}")

    @property
    def here(self) -> Path:
        """The shell's folder."""
        return Path(self.output("pwd").strip())

    def shell(self, line: str, place: str) -> None:
        """Run one line of a shell. The folder and exported variables carry over to the next."""
        if self._is_skipped(line):
            return
        line = self.stand_in(line)
        script = f"source {self._state}\nset -eo pipefail\n{line}\n"
        if SERVERS.search(line) or BESIDE.search(line):
            self._start(line, script, place)
            return
        script += f'{{ declare -px; echo cd "$(printf %q "$PWD")"; }} > {self._state}.new\n'
        script += f"mv {self._state}.new {self._state}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            env=self._environment,
            input="y\n",
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, (
            f"{place}: {line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
        self.printed += f"{done.stdout}\n{done.stderr}\n"

    def compare(self, block: Block) -> list[str]:
        """Compare the figures of a block that shows what was printed with what was. One line for
        each that was found."""
        found: list[str] = []
        for pattern, band in FIGURES.items():
            for shown in pattern.finditer(block.body):
                runs = [*pattern.finditer(self.printed)]
                assert runs, f"{block.place}: nothing printed {shown[0]!r}\n{self.printed[-2000:]}"
                pairs = list(zip(figures(shown), figures(runs[-1]), strict=True))
                found.append(f"{block.place}: {shown[0]}; now {runs[-1][0]}")
                assert all(abs(page - run) <= band for page, run in pairs), found[-1]
        return found

    def output(self, line: str) -> str:
        """What a line prints that does not belong to the page."""
        script = f"source {self._state}\n{line}\n"
        return subprocess.check_output(
            ["bash", "-c", script], env=self._environment, text=True, timeout=60
        )

    def python(self, block: Block) -> None:
        self.save(block)
        if "sys.stdin" in block.body:
            self.program(block)
            return
        if self._is_skipped(block.body):
            return
        self.execute(self.stand_in(block.body), block.place)

    def execute(self, source: str, place: str) -> None:
        """Run Python in the page's session."""
        if self._session is None:
            python = ["python", "-c", SESSION]
            self._session = subprocess.Popen(
                ["bash", "-c", f"source {self._state}\nexec {shlex.join(python)}"],
                env={**self._environment, "PYTHONPATH": self._path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._session.stdin is not None and self._session.stdout is not None
        self._session.stdin.write(json.dumps([place, source]) + "\n")
        self._session.stdin.flush()
        for line in self._session.stdout:
            if line.startswith("\0"):
                problem = json.loads(line[1:])
                assert not problem, f"{place}: {problem}"
                return
        raise AssertionError(f"{place}: Python ended")

    def run_file(self, block: Block) -> None:
        """Rehearse a run file, or a part of one on top of `run.yaml`. One with a file name is only
        saved."""
        if self._is_skipped(block.body) or self.save(block):
            return
        values = yaml.safe_load(self.stand_in(block.body))
        is_whole = {"agent", "model"} <= values.keys()
        given = (
            {} if is_whole else yaml.safe_load((self.here / "run.yaml").read_text(encoding="utf-8"))
        )
        (self.here / "block.yaml").write_text(yaml.safe_dump({**given, **values}), encoding="utf-8")
        rehearsed = "--steps 1" if values.get("algorithm", {}).get("name") == "sft" else "--dry-run"
        self.shell(f"agl train block.yaml {rehearsed}", block.place)

    def program(self, block: Block) -> None:
        """Run a program in any language as an agent that reads its task and gives itself a
        reward."""
        start, ending = {"python": ("python", "py"), "javascript": ("node", "mjs")}.get(
            block.language, ("bash", "sh")
        )
        file = self.folder / f"program.{ending}"
        file.write_text(block.body, encoding="utf-8")
        task = '{"question": "What is 1+1?", "answer": "2"}'
        words = f"AGL_MODEL=policy agl record -- {start} {shlex.quote(str(file))} 'What is 1+1?'"
        self.shell(f"echo {shlex.quote(task)} | {words}", block.place)

    def save(self, block: Block) -> bool:
        """Write a block that begins with its file's name; whether it does."""
        named = NAMED.match(block.body)
        if named:
            (self.here / named["name"]).write_text(self.stand_in(block.body), encoding="utf-8")
        return named is not None

    def finish(self, leave: re.Pattern[str] | None = None) -> None:
        """Wait for the trainings that run beside, then stop the other programs, but those that
        match `leave`."""
        for line, process, log in sorted(self.beside, key=lambda one: "agl train" not in one[0]):
            if leave is not None and leave.search(line):
                continue
            if "agl train" not in line:
                os.killpg(process.pid, signal.SIGTERM)
            code = process.wait(timeout=120)
            assert code in ENDED, f"{line}: exit code {code}\n{log.read_text()[-3000:]}"
        self.beside = [one for one in self.beside if leave is not None and leave.search(one[0])]
        if leave is None and self._session is not None:
            self._session.communicate(timeout=60)
            self._session = None

    def _start(self, line: str, script: str, place: str) -> None:
        """Start a program that stays, and wait until it writes something. A server takes the place
        of the last one."""
        if kind := SERVERS.search(line):
            self.finish(re.compile(rf"^(?!.*\b{kind[0]} )"))
        log = self.folder / f".log-{len(list(self.folder.glob('.log-*')))}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", script],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.beside.append((line, process, log))
        for _ in range(1200):
            if log.stat().st_size or process.poll() is not None:
                break
            time.sleep(0.1)
        assert log.stat().st_size and process.poll() in (None, 0), (
            f"{place}: {line}\n{log.read_text()[-3000:]}"
        )

    def stand_in(self, text: str) -> str:
        for pattern, replacement in {**self.shorter, **self.stand_ins}.items():
            if re.search(pattern, text):
                self.is_shortened |= pattern in self.shorter
                value = (
                    replacement
                    if isinstance(replacement, str)
                    else replacement().replace("\\", r"\\")
                )
                text = re.sub(pattern, value, text)
        return text

    def _is_skipped(self, text: str) -> bool:
        found = {pattern for pattern in self.skipped if re.search(pattern, text)}
        self.unused -= found
        return bool(found)


def figures(found: re.Match[str]) -> list[float]:
    return [float(group.replace(",", "")) for group in found.groups() if group is not None]


def agl_environment(programs: Path, **more: str) -> dict[str, str]:
    """The variables of a shell in which `agl` and `python` are those in the folder `programs`."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "AGL_", "HF_"))
    }
    return {
        **plain,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **more,
    }
