"""Agents that do what only a process of their own survives. Each does what its task names, and
returns its process."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import agentlightning as agl

_FOREVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
counter = 0


@agl.rollout
def acts(task: dict) -> float:
    """A sync agent."""
    _do(task)
    return float(os.getpid())


def plain(task: dict) -> float:
    """A function that nothing decorates."""
    return 1.0


class Stateful(agl.LitAgent):
    def __init__(self, reward: float) -> None:
        self.reward = reward

    def rollout(
        self, task: dict, resources: agl.NamedResources, rollout: agl.AttemptedRollout
    ) -> float:
        return self.reward


stateful = Stateful(0.25)


def _do(task: dict) -> None:
    global counter
    match task["do"]:
        case "exit":
            agl.emit_reward(0.5, final=False)
            print("last words", end="")
            os._exit(3)
        case "segfault":
            agl.emit_message("before")
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "raise":
            raise LookupError("nothing there")
        case "close descriptors":
            os.closerange(3, 256)
        case "hang":  # with a child that will not go by itself, as deaf as its parent cannot be
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import signal; signal.signal(15, signal.SIG_IGN); {_FOREVER}",
                ]
            )
            agl.emit_object({"pids": [os.getpid(), child.pid]})
            time.sleep(600)
        case "flood":
            for _ in range(400):
                sys.stdout.write("o" * 50_000)
            sys.stderr.write("the end")
        case "log":
            logging.getLogger("agent").warning("be warned")
            os.write(1, b"past sys.stdout\xff")
        case "leave thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True, name="left").start()
        case "leave process":
            subprocess.Popen([sys.executable, "-c", _FOREVER])
        case "leave daemon":
            subprocess.run(
                ["sh", "-c", "sleep 3 >/dev/null 2>&1 &"], start_new_session=True, check=True
            )
        case "count":
            counter += 1
            agl.emit_object({"count": counter})
        case "environment":
            names = ("AGL_KEY", "AGL_ROLLOUT_ID", "AGL_ATTEMPT_ID")
            agl.emit_object({name: os.environ.get(name) for name in names})
        case "numbers":
            agl.emit_object(
                {"group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid()}
            )
        case _:
            pass
