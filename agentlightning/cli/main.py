"""The entry point: finds the command, and turns every outcome into an exit code and a readable message.

Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted by Ctrl-C. Commands import what they need when they
run, so that `agl --help` is quick and `agl runner` needs no torch.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from agentlightning.errors import AgentLightningError, nearest
from agentlightning.runner.signals import exit_with

# Command → the module that defines it, under the same name as a click command.
COMMANDS = {
    "init": "training",
    "quickstart": "training",
    "train": "training",
    "sweep": "sweep",
    "eval": "evaluation",
    "chat": "serving",
    "serve": "serving",
    "server": "serving",
    "runner": "runner",
    "record": "record",
    "import": "transfer",
    "export": "transfer",
    "ui": "serving",
    "runs": "runs",
    "rollouts": "rollouts",
    "store": "store",
    "keys": "store",
    "doctor": "doctor",
}
# Extra → the packages that come with it alone, by the names they are imported under.
EXTRAS = {
    "ray": ("ray",),
    "server": ("google", "httptools", "numpy", "opentelemetry", "prometheus_client", "starlette", "uvicorn", "uvloop"),
    "train": ("matplotlib", "openai", "tokenizers", "torch", "transformers"),
}
# These need `train`, whichever package is missed first.
TRAINING = ("quickstart", "train", "sweep", "eval", "chat", "serve")


class LazyGroup(click.Group):
    """A group that imports a command's module when needed, and suggests the nearest name for an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"agentlightning.cli.{COMMANDS[cmd_name]}")
        return getattr(module, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


@click.group(cls=LazyGroup, context_settings=_SETTINGS)
@click.version_option(package_name="agent-lightning-next", prog_name="agl")
def agl() -> None:
    """Train any AI agent with reinforcement learning, without changing the agent."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit the process with its code."""
    # Torch then allocates in huge pages, which saves the engine about a tenth of its CPU time. Set before torch loads.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    exit_with(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        result = agl.main(args=None if arguments is None else list(arguments), prog_name="agl", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except (AgentLightningError, ModuleNotFoundError) as error:
        hint = _how_to_install(error, sys.argv[1:] if arguments is None else arguments)
        if isinstance(error, ModuleNotFoundError) and not hint:
            raise
        from agentlightning.tracing.tree import printable

        click.echo(f"error: {printable(str(error))}{hint}", err=True)
        return 1
    except BrokenPipeError:
        # The reader of our output has left (`agl runs | head`); stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _how_to_install(error: Exception, words: Sequence[str]) -> str:
    """How to install a missing package of one of our extras; empty for other errors."""
    for missing in (error, error.__cause__):
        if isinstance(missing, ModuleNotFoundError) and missing.name is not None:
            for extra, packages in EXTRAS.items():
                if missing.name.partition(".")[0] in packages:
                    extra = "train" if extra == "server" and words[0] in TRAINING else extra
                    return f": pip install 'agent-lightning-next[{extra}]'"
    return ""


if __name__ == "__main__":
    main()
