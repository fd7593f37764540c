"""The kinds of items, parts and tools of each protocol: which ones the model sees, which are left
out with a note, and which refuse a call.

What is left out was run by the provider's own servers, or only informs. A kind is refused only
where an answer without it would be an answer to something else. Of a kind that is not listed, plain
text is read, and the rest left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from agentlightning.gateway.request import CallRefused


class Kinds(NamedTuple):
    """Kinds by what becomes of them. `refused` says of each what to do; `code` is that of the
    refusals."""

    read: frozenset[str]
    dropped: frozenset[str]
    refused: Mapping[str, str]
    code: str

    def read_as(self, kind: object, text: object, where: str, dropped: set[str]) -> str | None:
        """The kind that a part of this `kind`, with this `text`, is read as; None for one that is
        left out, whose name goes to `dropped`. `where` is its place: `input[3].content[0]`.
        CallRefused (400) for a kind that is refused."""
        kind = kind if isinstance(kind, str) else "unknown"
        if kind in self.read:
            return kind
        if kind in self.refused:
            raise CallRefused(
                f"{where} is of type {kind!r}: {self.refused[kind]}", code=self.code, param=where
            )
        if kind not in self.dropped and isinstance(text, str):
            return "text"
        dropped.add(f"{where.partition('[')[0]}.{kind}"[:100])
        return None


def _kinds(read: str, dropped: str = "", **refused: str) -> Kinds:
    return Kinds(
        frozenset(read.split()), frozenset(dropped.split()), refused, "unsupported_content"
    )


def _tools(read: str, dropped: str, **refused: str) -> Kinds:
    return _kinds(read, dropped, **refused)._replace(code="unsupported_tool")


_COMPACTED: Final = (
    "only its server can read the conversation that it stands for; send the messages themselves"
)
_DEFINE: Final = (
    "the gateway runs no tools, and this one is not replaced by another; define a function"
)

KINDS: Final[Mapping[str, Mapping[str, Kinds]]] = {
    "chat/completions": {
        "parts": _kinds(
            "text input_text refusal image_url video_url input_audio file", "thinking reasoning"
        ),
        "tools": _tools("function custom", "web_search web_search_preview"),
    },
    "responses": {
        "items": _kinds(
            "message reasoning function_call function_call_output custom_tool_call "
            "custom_tool_call_output local_shell_call local_shell_call_output shell_call "
            "shell_call_output apply_patch_call apply_patch_call_output additional_tools "
            "tool_search_output item_reference",
            "web_search_call file_search_call code_interpreter_call image_generation_call "
            "computer_call computer_call_output mcp_call mcp_list_tools mcp_approval_request "
            "mcp_approval_response tool_search_call",
            compaction=_COMPACTED,
            compaction_summary=_COMPACTED,
            context_compaction=_COMPACTED,
            compaction_trigger="conversations are not compacted here; summarise it yourself",
        ),
        "parts": _kinds(
            "input_text output_text text refusal reasoning_text summary_text input_image "
            "computer_screenshot input_audio input_file",
            "encrypted_content",
        ),
        "tools": _tools(
            "function custom namespace",
            "web_search web_search_preview web_search_2025_08_26 web_search_preview_2025_03_11 "
            "image_generation code_interpreter tool_search",
            file_search=_DEFINE,
            mcp=_DEFINE,
            computer=_DEFINE,
            computer_use_preview=_DEFINE,
            local_shell=_DEFINE,
            shell=_DEFINE,
            apply_patch=_DEFINE,
        ),
    },
    "messages": {
        "parts": _kinds(
            "text image tool_use tool_result thinking document search_result tool_reference "
            "compaction",
            "redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result "
            "code_execution_tool_result bash_code_execution_tool_result "
            "text_editor_code_execution_tool_result tool_search_tool_result mcp_tool_use "
            "mcp_tool_result container_upload",
        ),
        "tools": _tools(
            "custom",
            "web_search web_fetch code_execution tool_search_tool_regex tool_search_tool_bm25",
            bash=_DEFINE,
            computer=_DEFINE,
            memory=_DEFINE,
            text_editor=_DEFINE,
            mcp_toolset=_DEFINE,
        ),
    },
    "generateContent": {
        "parts": _kinds(
            "text functionCall functionResponse inlineData fileData",
            "executableCode codeExecutionResult toolCall toolResponse",
        ),
        "tools": _tools(
            "functionDeclarations",
            "googleSearch googleSearchRetrieval googleMaps urlContext codeExecution",
            computerUse=_DEFINE,
            fileSearch=_DEFINE,
            mcpServers=_DEFINE,
            retrieval=_DEFINE,
            enterpriseWebSearch=_DEFINE,
        ),
    },
}
"""By protocol and place."""
