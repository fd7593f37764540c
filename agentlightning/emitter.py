"""Emitters and what reads them back, under the module name that Agent Lightning 0.3 gave them."""

from agentlightning.tracing.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    get_message_value,
    get_object_value,
    reward,
)
from agentlightning.tracing.operation import operation
from agentlightning.tracing.rewards import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "reward",
]
