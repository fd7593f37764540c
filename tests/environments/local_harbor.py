"""An environment of Harbor that is a folder of this machine instead of a container, and a harness
of one question."""

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult

ASK = """
import openai, sys
answer = openai.OpenAI().chat.completions.create(model=sys.argv[1], messages=[{"role": "user", "content": sys.argv[2]}])
open("answer.txt", "w").write(answer.choices[0].message.content or "")
"""


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="agl-test-harbor-"))
        for name in ("app", "tests", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self._root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _here(self, path: str) -> Path:
        return self._root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command, cwd=None, env=None, timeout_sec=None, user=None, **more
    ) -> ExecResult:
        here = re.sub(r"/(app|tests|logs)\b", rf"{self._root}/\1", command)
        done = await asyncio.to_thread(
            subprocess.run,
            here,
            shell=True,
            cwd=self._root / "app",
            env=env,
            capture_output=True,
            text=True,
        )
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)


class Asking(BaseAgent):
    @staticmethod
    def name() -> str:
        return "asking"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        model = self.model_name.removeprefix("openai/")
        words = [sys.executable, "-c", ASK, model, instruction.strip()]
        await environment.exec(shlex.join(words), env=self.extra_env)
