"""`agl chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from agentlightning.cli.options import (
    COUNT,
    combined,
    json_option,
    key_option,
    model_options,
    note,
    print_json,
)
from agentlightning.cli.server_commands import served_model


@click.command()
@click.argument("model", metavar="MODEL|URL")
@click.option("--system", metavar="TEXT", help="System message of each conversation.")
@key_option("The key for URL.", default="any")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="Sampling temperature; default: the server's.",
)
@click.option("--max-tokens", type=COUNT, default=512, help="Limit of an answer, in tokens.")
@combined(*model_options)
@json_option
def chat(model: str, model_name: str, key: str, seed: int, **conversation: Any) -> int:
    """Talk to a model in the terminal.

    MODEL is a checkpoint's directory, a Hugging Face id, or FILE.py:NAME; at URL, a server answers.

    Type one message per line; /new starts a new conversation, /quit or Ctrl-D ends. Nothing is
    stored. The exit code is 1 if no message was answered."""
    from agentlightning.server.serve import run_on_fastest_loop

    talk = partial(_converse, model_name=model_name, key=key, **conversation)
    if model.startswith(("http://", "https://")):
        return talk(model.rstrip("/").removesuffix("/v1"))

    async def work() -> int:
        async with served_model(model, model_name=model_name, seed=seed) as url:
            return await asyncio.to_thread(talk, url)

    return run_on_fastest_loop(work())


def _converse(
    url: str, *, model_name: str, key: str, system: str | None, as_json: bool, **asked: Any
) -> int:
    from openai import APIConnectionError, OpenAI, OpenAIError

    from agentlightning.tracing.tree import printable

    asked = {name: value for name, value in asked.items() if value is not None}
    begun = [{"role": "system", "content": system}] if system else []
    messages: list[Any] = [*begun]
    answered = failed = 0
    if sys.stdin.isatty():
        note(f"{model_name} at {url}: a message a line; /new begins again, /quit ends")
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        for text in _lines():
            if text == "/new":
                messages = [*begun]
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                for piece in client.chat.completions.create(
                    model=model_name, messages=messages, stream=True, **asked
                ):
                    delta = (piece.choices[0].delta.content or "") if piece.choices else ""
                    answer += delta
                    if not as_json:
                        click.echo(printable(delta), nl=False)
            except OpenAIError as error:
                messages.pop()
                failed += 1
                nobody = f"nothing answers at {url}; is the server running?"
                why = nobody if isinstance(error, APIConnectionError) else printable(str(error))
                click.echo(f"error: {why}", err=True)
                continue
            messages.append({"role": "assistant", "content": answer})
            answered += 1
            if as_json:
                print_json({"question": text, "answer": answer})
            else:
                click.echo()
    return 1 if failed and not answered else 0


def _lines() -> Iterator[str]:
    """The typed lines until /quit or the end, without empty ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line
