"""The entry point: finds the command, and turns every outcome into an exit code and a readable
message.

Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted by Ctrl-C. Commands import what
they need when they run, so that `agl --help` is quick and `agl runner` needs no torch."""

from __future__ import annotations

import importlib
import io
import keyword
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from agentlightning.cli.options import TerminalFormatter, common_options
from agentlightning.errors import AgentLightningError, nearest
from agentlightning.proxies import spare_this_machine
from agentlightning.runner.signals import exit_with

# Commands by purpose, as `agl --help` groups them: command → the module that defines it, under the
# same name.
GROUPS = {
    "Train": {
        "init": "training",
        "quickstart": "training",
        "train": "training",
        "improve": "improve",
        "sweep": "sweep",
    },
    "Measure": {
        "eval": "eval",
        "prompts": "prompts",
        "record": "record",
        "runs": "runs",
        "replay": "replay",
        "regrade": "regrade",
        "fork": "fork",
        "rollouts": "rollouts",
        "ui": "server_commands",
        "import": "import_export",
        "export": "import_export",
    },
    "Serve": {
        "serve": "server_commands",
        "chat": "chat",
        "server": "server_commands",
        "runner": "runner",
    },
    "Operate": {"store": "store", "keys": "store", "doctor": "doctor"},
}
COMMANDS = {name: module for commands in GROUPS.values() for name, module in commands.items()}
SUMMARY = 50  # characters of a command's line in `--help`
# Extra → the packages that come with it alone, by the names they are imported under.
EXTRAS = {
    "ray": ("ray",),
    "server": (
        "google",
        "httptools",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "starlette",
        "uvicorn",
        "uvloop",
    ),
    "train": ("matplotlib", "openai", "tokenizers", "torch", "transformers"),
}
# These need `train`, whichever package is missed first.
TRAINING = (
    *("quickstart", "train", "improve", "sweep", "eval", "prompts", "chat", "serve", "replay"),
    "fork",
)


class LazyGroup(click.Group):
    """A group that imports a command's module when needed, and suggests the nearest name for an
    unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"agentlightning.cli.{COMMANDS[cmd_name]}")
        command = getattr(module, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)
        _add_common_options(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, names in GROUPS.items():
            found = {name: self.get_command(ctx, name) for name in names}
            with formatter.section(group):
                lines = [
                    (name, command.get_short_help_str(SUMMARY + 3))
                    for name, command in found.items()
                    if command
                ]
                formatter.write_dl(lines, col_spacing=2, col_max=12)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


def _add_common_options(command: click.Command) -> None:
    """Let a command and its subcommands take the options of `agl` behind their names, too."""
    inner = list(command.commands.values()) if isinstance(command, click.Group) else []
    for each in (command, *inner):
        known = {parameter.name for parameter in each.params}
        each.params += [
            option for option in common_options(hidden=True) if option.name not in known
        ]


_STRICT: Final = ("strict", "surrogateescape")
_SETTINGS: Final = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "show_default": True,
}


@click.group(cls=LazyGroup, context_settings=_SETTINGS, params=common_options())
@click.version_option(package_name="agent-lightning-next", prog_name="agl")
def agl() -> None:
    """Train any AI agent with reinforcement learning, without changing the agent.

    -q, -v and --no-color may also follow the command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit the process with its code."""
    # Torch then allocates in huge pages, which saves the engine about a tenth of its CPU time. Set
    # before torch loads.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    spare_this_machine()
    exit_with(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    asked: dict[str, bool] = {}
    if logging.lastResort is not None:  # which prints warnings where nothing is configured
        logging.lastResort.setFormatter(TerminalFormatter())
    try:
        for stream in (sys.stdout, sys.stderr):
            # a question mark for a character that the terminal's encoding lacks, not an error
            if isinstance(stream, io.TextIOWrapper) and stream.errors in _STRICT:
                stream.reconfigure(errors="replace")
        result = agl.main(args=words, prog_name="agl", standalone_mode=False, obj=asked)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except (AgentLightningError, ModuleNotFoundError) as error:
        hint = _how_to_install(error, words)
        if isinstance(error, ModuleNotFoundError) and not hint:
            raise
        if asked.get("verbose"):
            click.echo(_quoted("".join(traceback.format_exception(error))), err=True)
        click.echo(f"error: {_quoted(str(error))}{hint}", err=True)
        return 1
    except BrokenPipeError:
        # The reader of our output has left (`agl runs | head`); stdout must not be flushed again at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _quoted(text: str) -> str:
    """An error's text, which may quote anybody's, for the terminal."""
    from agentlightning.store.redaction import text_without_secrets
    from agentlightning.tracing.tree import printable

    return printable(text_without_secrets(text))


def _how_to_install(error: Exception, words: Sequence[str]) -> str:
    """The command that installs a missing package of one of our extras; empty for other errors."""
    for missing in (error, error.__cause__):
        if isinstance(missing, ModuleNotFoundError) and missing.name is not None:
            for extra, packages in EXTRAS.items():
                if missing.name.partition(".")[0] in packages:
                    extra = "train" if extra == "server" and words[0] in TRAINING else extra
                    return f": pip install 'agent-lightning-next[{extra}]'"
    return ""


if __name__ == "__main__":
    main()
