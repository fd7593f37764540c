"""Attribute and span names: OpenTelemetry's `gen_ai.*` where it has one, `agentlightning.*` where
it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__

# Spans of our own (names kept from Agent Lightning 0.3).
ANNOTATION: Final = "agentlightning.annotation"
MESSAGE: Final = "agentlightning.message"
OBJECT: Final = "agentlightning.object"
EXCEPTION: Final = "agentlightning.exception"
OPERATION: Final = "agentlightning.operation"
# a span that only says which call's answer nobody received
UNDELIVERED: Final = "agentlightning.call.undelivered"
REWARD: Final = "agentlightning.reward"
LOG: Final = "agentlightning.log"  # what an attempt wrote to one stream, not one line of it

# Resource attributes that bind a span to its attempt.
ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SPAN_SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
# True on a span of OpenTelemetry's SDK that outlived its attempt
UNFINISHED: Final = "agentlightning.unfinished"


# False on an intermediate reward; absent: the rollout's reward
REWARD_FINAL: Final = "agentlightning.reward.final"
# True on what the agent returned, which is its last word
REWARD_RETURNED: Final = "agentlightning.reward.returned"
# True on what came to the reward URL: by the server's clock
REWARD_POSTED: Final = "agentlightning.reward.posted"


# its square, times a million, is a float32 still, in which gradients are summed
LARGEST_REWARD: Final = 1e12


def reward_name(index: int) -> str:
    return f"{REWARD}.{index}.name"


def reward_value(index: int) -> str:
    return f"{REWARD}.{index}.value"


def is_reward_value(name: str) -> bool:
    return name.startswith(f"{REWARD}.") and name.endswith(".value")


LINK: Final = "agentlightning.link"  # .N.key_match and .N.value_match: what the span is about
TAG: Final = "agentlightning.tag"  # .N: free words


# On a gateway call, beside its token ids (which are stored as binary, not as attributes).
CALL: Final = "agentlightning.call."  # how names begin that only the gateway writes
CALL_INDEX: Final = "agentlightning.call.index"  # 0, 1, 2 … within the attempt
# index of the call that it goes on from; -1: it begins anew
CALL_CONTINUES: Final = "agentlightning.call.continues"
CALL_SHARED_MESSAGES: Final = "agentlightning.call.shared_messages"  # with that call and its answer
# whether its prompt starts with those of that call
CALL_TOKENS_AGREE: Final = "agentlightning.call.tokens_agree"
# the protocol it came in, such as `chat/completions`
CALL_ENDPOINT: Final = "agentlightning.call.endpoint"
CALL_STREAM: Final = "agentlightning.call.stream"
# JSON of the request as it came, without messages and tools
CALL_REQUEST: Final = "agentlightning.call.request"
# the text that was continued, where there were no messages
CALL_PROMPT: Final = "agentlightning.call.prompt"
# the answer as it came, of endpoints that are passed through
CALL_RESPONSE: Final = "agentlightning.call.response"
CALL_SAMPLING: Final = "agentlightning.call.sampling"  # JSON of the sampling that was in effect
# JSON of what the agent asked instead, if it differed
CALL_OVERRIDDEN: Final = "agentlightning.call.overridden"
CALL_DROPPED: Final = "agentlightning.call.dropped"  # names of fields that the backend was not sent
# why this call must not be trained, absent if it may
CALL_FLAG: Final = "agentlightning.call.untrainable"
# indices of calls whose answers nobody received
CALL_DISCARDS: Final = "agentlightning.call.discards"
# rollout, attempt and index of the call whose recorded answer this one got
CALL_REPLAYED_ROLLOUT: Final = "agentlightning.call.replayed.rollout"
CALL_REPLAYED_ATTEMPT: Final = "agentlightning.call.replayed.attempt"
CALL_REPLAYED_INDEX: Final = "agentlightning.call.replayed.index"
# how a live call differs from all that is recorded
CALL_DIVERGED: Final = "agentlightning.call.diverged"
# when an answer that is repeated was made, in whole seconds
CALL_CREATED: Final = "agentlightning.call.created"
# JSON of the parts of an answer that are neither its messages nor its tokens
CALL_ANSWER: Final = "agentlightning.call.answer"
# values of CALL_FLAG: the call of a fork whose content is at its source, the answer that was
# given to a fork, and live calls of a fork behind a divergence
REPLAYED: Final = "replayed"
GIVEN: Final = "given"
DIVERGED: Final = "diverged"
CALL_BACKEND: Final = "agentlightning.call.backend"
CALL_FIRST_VERSION: Final = "agentlightning.call.policy_version.first"  # of the first sampled token
CALL_LAST_VERSION: Final = "agentlightning.call.policy_version.last"
CALL_TRAINABLE: Final = "agentlightning.call.trainable"  # False for a frozen model
# the id of the agent that started this one
CALL_PARENT_AGENT: Final = "agentlightning.call.parent_agent"
# what a call is for beside the task: title, compaction …
CALL_HOUSEKEEPING: Final = "agentlightning.call.housekeeping"
# how the system prompt that the agent sent begins, which names the agent
CALL_OPENING: Final = "agentlightning.call.opening"
# JSON of the candidate and of the components whose texts the gateway replaced
CALL_REPLACED: Final = "agentlightning.call.replaced"
# a span that says why a request was refused, and there its path
CALL_REFUSED: Final = "agentlightning.call.refused"
# before its start, while weights were updated
CALL_HELD_SECONDS: Final = "agentlightning.call.held_seconds"
# `true` on a request whose answer must not be trained, as a judge's
FROZEN_HEADER: Final = "x-agentlightning-frozen"
# prompt tokens taken from recorded answers
RECORDED_SPLICE: Final = "agentlightning.call.spliced_tokens"

OPERATION_NAME: Final = "agentlightning.operation.name"
# spread below it: .city, .rows.0.price; once one JSON text
OPERATION_INPUT: Final = "agentlightning.operation.input"
# a scalar or a list, or spread as the input is
OPERATION_OUTPUT: Final = "agentlightning.operation.output"
# the whole output as JSON, where it is exact
OPERATION_RESULT: Final = "agentlightning.operation.result"
# `true` if it must not run twice in attempts that walk the same calls
OPERATION_ONCE: Final = "agentlightning.operation.once"
# the server's name, if it is known, of an operation that is a tool call of an MCP session
OPERATION_MCP: Final = "agentlightning.operation.mcp"
# `true` if the recorded result was given and nothing ran
OPERATION_REPLAYED: Final = "agentlightning.operation.replayed"
REDACTED: Final = "[redacted]"  # in the place of a secret
LOG_STREAM: Final = "agentlightning.log.stream"  # stdout, stderr or log (Python's logging)
LOG_TEXT: Final = "agentlightning.log.text"
OBJECT_TYPE: Final = "agentlightning.object.type"  # qualified name of its Python type
OBJECT_JSON: Final = "agentlightning.object.json"
MESSAGE_BODY: Final = "agentlightning.message.body"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# OpenTelemetry gen_ai (semantic conventions 1.44).
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # JSON, as the agent sent them
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"  # JSON, one message per choice
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"  # JSON
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_AGENT_ID: Final = "gen_ai.agent.id"
ERROR_TYPE: Final = "error.type"
HTTP_STATUS: Final = "http.response.status_code"
