"""A taskset of verifiers with a harness of its own: questions about the stock of a shop, and a loop
with one tool."""

import json
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["ShopHarness", "ShopTaskset"]

ROWS = [
    json.loads(line)
    for name in ("tasks", "heldout")
    for line in (Path(__file__).parents[1] / "tutorial" / f"{name}.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
STOCK = {row["item"]: row["answer"] for row in ROWS}
TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "How many of an item are in stock.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}


class ShopData(vf.TaskData):
    answer: int


class ShopTask(vf.Task[ShopData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content == str(self.data.answer))

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(len(trace.calls) > 1)


class ShopConfig(vf.TasksetConfig):
    split: str = "tasks"


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> list[ShopTask]:
        rows = Path(__file__).parents[1] / "tutorial" / f"{self.config.split}.jsonl"
        loaded = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        return [
            ShopTask(ShopData(prompt=row["question"], answer=row["answer"]), self.config.task)
            for row in loaded
        ]


class ShopHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL]
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    try:
                        found = str(
                            STOCK.get(json.loads(call.function.arguments)["item"], "no such item")
                        )
                    except (ValueError, KeyError, TypeError) as error:
                        found = f"Error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
                if not message.tool_calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
