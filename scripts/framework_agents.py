"""The same two agents, written with each framework: a writer with a tool that works and one that
fails, and a rewriter.

Run by scripts/record_framework_spans.py in the framework's own environment, as
`python framework_agents.py NAME ROLLOUT ATTEMPT`: the spans of the real instrumentation, as spans
of ours, are written to standard output as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.store.otel import span_of
from agentlightning.tracing.instrument import instrument

TASK = "Add 1 and 2, then explode 3, and write about it."
WRITER = "You are the writer. Use your tools."
REWRITER = "You are the rewriter. Make it shorter."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def boom(x: int) -> int:
    """Explode a number."""
    raise ValueError(f"{x} exploded")


def langchain(name: str = "langchain") -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    if name == "langchain":
        instrument("langchain")
    else:
        from opentelemetry.instrumentation.langchain import LangchainInstrumentor

        LangchainInstrumentor().instrument()
    writer = create_agent(
        ChatOpenAI(model="policy"), [add, boom], system_prompt=WRITER, name="writer"
    )
    rewriter = create_agent(ChatOpenAI(model="policy"), [], system_prompt=REWRITER, name="rewriter")
    with contextlib.suppress(ValueError):  # a failing tool ends a run of LangChain's
        writer.invoke({"messages": [("user", TASK)]})
    rewriter.invoke({"messages": [("user", "3")]})


def langgraph() -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    instrument("langchain")
    model = ChatOpenAI(model="policy")

    def writer(state: Any) -> Any:
        return {
            "messages": [
                model.bind_tools([add, boom]).invoke([("system", WRITER), *state["messages"]])
            ]
        }

    def rewriter(state: Any) -> Any:
        return {"messages": [model.invoke([("system", REWRITER), ("user", "3")])]}

    def after_writer(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else "rewriter"

    graph = StateGraph(MessagesState)
    graph.add_node("writer", writer)
    graph.add_node("rewriter", rewriter)
    graph.add_node("tools", ToolNode([add, boom], handle_tool_errors=True))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", after_writer, ["tools", "rewriter"])
    graph.add_edge("tools", "writer")
    graph.add_edge("rewriter", END)
    graph.compile().invoke({"messages": [("user", TASK)]})


def openai_agents(name: str = "openai-agents") -> None:
    from agents import Agent, Runner, function_tool

    if name == "openai-agents":
        instrument("openai-agents")
    else:
        from opentelemetry.instrumentation.openai_agents import OpenAIAgentsInstrumentor

        from agentlightning.tracing.instrument import quiet_openai_agents

        quiet_openai_agents()
        OpenAIAgentsInstrumentor().instrument()
    tools = [function_tool(add), function_tool(boom)]
    writer = Agent(name="writer", instructions=WRITER, model="policy", tools=tools)
    rewriter = Agent(name="rewriter", instructions=REWRITER, model="policy")
    Runner.run_sync(writer, TASK)
    Runner.run_sync(rewriter, "3")


def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    instrument("autogen")
    info = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    client = OpenAIChatCompletionClient(
        model="policy", model_info={**info, "function_calling": True, "family": "unknown"}
    )

    async def run() -> None:
        writer = AssistantAgent(
            "writer", client, tools=[add, boom], system_message=WRITER, max_tool_iterations=5
        )
        await writer.run(task=TASK)
        await AssistantAgent("rewriter", client, system_message=REWRITER).run(task="3")

    asyncio.run(run())


def crewai() -> None:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    instrument("crewai", "openai")
    model = LLM(model="policy", provider="openai")
    writer = Agent(
        role="writer", goal="write", backstory=WRITER, llm=model, tools=[tool(add), tool(boom)]
    )
    rewriter = Agent(role="rewriter", goal="shorten", backstory=REWRITER, llm=model)
    tasks = [
        Task(description=TASK, expected_output="a text", agent=writer),
        Task(description="Shorten it.", expected_output="a text", agent=rewriter),
    ]
    Crew(agents=[writer, rewriter], tasks=tasks).kickoff()


def agent_framework() -> None:
    from agent_framework.openai import OpenAIChatCompletionClient

    instrument("agent-framework")

    async def run() -> None:
        client = OpenAIChatCompletionClient(model="policy")
        await client.as_agent(name="writer", instructions=WRITER, tools=[add, boom]).run(TASK)
        await client.as_agent(name="rewriter", instructions=REWRITER).run("3")

    asyncio.run(run())


def openai() -> None:
    from openai import OpenAI

    instrument("openai")
    client = OpenAI()
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "3"}])
    client.responses.create(model="policy", input="3")


def anthropic() -> None:
    from anthropic import Anthropic

    instrument("anthropic")
    Anthropic().messages.create(
        model="policy", max_tokens=50, messages=[{"role": "user", "content": "3"}]
    )


def smolagents() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    instrument("smolagents")
    model = OpenAIModel("policy")
    tools = [tool(described(add)), tool(described(boom))]
    ToolCallingAgent(tools, model, name="writer", description=WRITER, max_steps=2).run(TASK)
    ToolCallingAgent([], model, name="rewriter", description=REWRITER, max_steps=1).run("3")


def described(function: Callable[..., Any]) -> Callable[..., Any]:
    """With the docstring that smolagents asks for."""
    lines = (f"    {name}: A number." for name in function.__annotations__ if name != "return")
    function.__doc__ = "\n".join([function.__doc__ or "", "", "Args:", *lines])
    return function


def dspy() -> None:
    import dspy

    instrument("dspy")
    dspy.configure(lm=dspy.LM("openai/policy", cache=False))

    class writer(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write = dspy.ReAct(
                dspy.Signature("task -> text", WRITER), tools=[add, boom], max_iters=3
            )

        def forward(self, task: str) -> Any:
            return self.write(task=task)

    class rewriter(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shorten = dspy.Predict(dspy.Signature("text -> shorter", REWRITER))

        def forward(self, text: str) -> Any:
            return self.shorten(text=text)

    writer()(task=TASK)
    rewriter()(text="3")


def google_adk() -> None:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    instrument("google_adk")
    model = LiteLlm("openai/policy")

    def survive(tool: Any, args: Any, tool_context: Any, error: Exception) -> dict[str, str]:
        return {"error": str(error)}

    writer = LlmAgent(
        name="writer",
        model=model,
        instruction=WRITER,
        tools=[add, boom],
        on_tool_error_callback=survive,
    )
    rewriter = LlmAgent(name="rewriter", model=model, instruction=REWRITER)

    async def run() -> None:
        for agent, said in ((writer, TASK), (rewriter, "3")):
            runner = InMemoryRunner(agent)
            session = await runner.session_service.create_session(
                app_name=runner.app_name, user_id="u"
            )
            message = types.Content(role="user", parts=[types.Part(text=said)])
            async for _ in runner.run_async(
                user_id="u", session_id=session.id, new_message=message
            ):
                pass

    asyncio.run(run())


def agno() -> None:
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    instrument("agno")
    Agent(
        name="writer",
        model=OpenAIChat("policy"),
        instructions=WRITER,
        tools=[add, boom],
        telemetry=False,
    ).run(TASK)
    Agent(name="rewriter", model=OpenAIChat("policy"), instructions=REWRITER, telemetry=False).run(
        "3"
    )


def llama_index() -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    instrument("llama_index")
    model = OpenAILike(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        is_chat_model=True,
        is_function_calling_model=True,
    )

    async def run() -> None:
        writer = FunctionAgent(
            name="writer", llm=model, system_prompt=WRITER, tools=[add, boom], streaming=False
        )
        await writer.run(TASK)
        await FunctionAgent(
            name="rewriter", llm=model, system_prompt=REWRITER, streaming=False
        ).run("3")

    asyncio.run(run())


def pydantic_ai() -> None:
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel

    instrument("pydantic_ai")

    def boom(x: int) -> int:
        """Explode a number."""
        raise ModelRetry(f"{x} exploded")

    model = OpenAIChatModel("policy")
    Agent(model, name="writer", instructions=WRITER, tools=[add, boom]).run_sync(TASK)
    Agent(model, name="rewriter", instructions=REWRITER).run_sync("3")


PROGRAMS: dict[str, Callable[[], None]] = {
    "langchain": langchain,
    "langchain-traceloop": lambda: langchain("traceloop"),
    "langgraph": langgraph,
    "openai-agents": openai_agents,
    "openai-agents-v2": lambda: openai_agents("v2"),
    "autogen": autogen,
    "crewai": crewai,
    "agent-framework": agent_framework,
    "openai": openai,
    "anthropic": anthropic,
    "smolagents": smolagents,
    "dspy": dspy,
    "google-adk": google_adk,
    "agno": agno,
    "llama-index": llama_index,
    "pydantic-ai": pydantic_ai,
}

if __name__ == "__main__":
    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    with contextlib.redirect_stdout(sys.stderr):
        PROGRAMS[sys.argv[1]]()
    spans = [span_of(sys.argv[2], sys.argv[3], 0, span) for span in memory.get_finished_spans()]
    sys.stdout.buffer.write(msgspec.json.encode(spans))
