"""The gateway remembers earlier responses, and only so much of them."""

from __future__ import annotations

import json

import pytest

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import NOBODY
from agentlightning.gateway.backend import Delta, Finished
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.previous_responses import Conversations
from agentlightning.gateway.request import CallRefused, CallRequest


def asked(text: str, **fields: object) -> CallRequest:
    return Responses().read(json.dumps({"model": "m", "input": text, **fields}).encode())


def known(conversations: Conversations, *texts: str) -> list[bool]:
    """Whether the responses to these texts can be continued; they are used in this order."""
    found = list[bool]()
    for text in texts:
        try:
            request = conversations.join(
                NOBODY, asked("more", previous_response_id=f"resp_{text[0]}")
            )
            assert [message["content"] for message in request.messages] == [text, "yes", "more"]
            found.append(True)
        except CallRefused:
            found.append(False)
    return found


@pytest.mark.parametrize(
    ("limits", "text"), [({"limit_count": 2}, ""), ({"limit_bytes": 7000}, "x" * 3000)]
)
def test_the_least_recently_used_is_forgotten(limits: dict[str, int], text: str) -> None:
    conversations, texts = Conversations(**limits), [name + text for name in "abc"]
    for name in texts:
        answer = Answer(1, f"resp_{name[0]}")
        answer.add(Delta(0, {"content": "yes"}))
        answer.add(Finished(0, "stop"))
        conversations.remember(NOBODY, asked(name), answer)
        assert known(conversations, texts[0]) == [True]
    assert known(conversations, *texts) == [True, False, True]
