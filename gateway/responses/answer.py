"""The `response` object: of a whole answer, and the parts that streams share with it.

status      completed | incomplete (at max_output_tokens, or by a filter) | failed
store       whether it can be asked for again: what was done, not what was asked
"""

from typing import Any

import msgspec

from core.errors import DIALECTS, Refusal
from gateway.conversation import Answer, Conversation, Finish
from gateway.items import Ask, Item
from gateway.openai.generation import SERVED_TIERS
from gateway.responses.items import item_json
from gateway.responses.output import output_of
from gateway.responses.usage import from_usage

_REASONS: dict[Finish, str] = {"length": "max_output_tokens", "filtered": "content_filter"}
_RATE_LIMITED = 429


def response_json(
    answer: Answer,
    conversation: Conversation,
    *,
    request_id: str,
    created_ms: int,
    ended_ms: int,
    kept: bool,
) -> bytes:
    """The body of a whole answer."""
    (choice,) = answer.choices
    whole = is_whole(choice.finish)
    return msgspec.json.encode(
        {
            **response_fields(conversation, response_id(request_id), created_ms // 1000),
            **ended(choice.finish, completed_s=ended_ms // 1000),
            "output": output_of(choice, request_id, ask_of(conversation)).json(whole=whole),
            "usage": from_usage(answer.usage, answer.bill),
            "store": kept,
        }
    )


def answer_items(answer: Answer, conversation: Conversation, request_id: str) -> tuple[Item, ...]:
    """What is kept of an answer, to be continued from: all that was thought, told or not."""
    (choice,) = answer.choices
    return output_of(choice, request_id, ask_of(conversation)).said(whole=is_whole(choice.finish))


def ask_of(conversation: Conversation) -> Ask:
    """Which every request for a response has."""
    assert conversation.ask is not None
    return conversation.ask


def response_id(request_id: str) -> str:
    """`req_x` -> `resp_x`: the answer's name leads back to the request."""
    return "resp_" + request_id.removeprefix("req_")


def response_fields(conversation: Conversation, name: str, created_s: int) -> dict[str, Any]:
    """All but how it went: what was asked, and how it is served."""
    ask = ask_of(conversation)
    return {
        "id": name,
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "max_tool_calls": None,
        "model": conversation.model,
        "output": [],
        "service_tier": SERVED_TIERS[conversation.service_class],
        "store": ask.keep,
        "usage": None,
        **ask.shown,
    }


def ended(finish: Finish, *, completed_s: int) -> dict[str, Any]:
    """How it went. Only what was completed says when."""
    if is_whole(finish):
        return {"status": "completed", "completed_at": completed_s}
    return {"status": "incomplete", "incomplete_details": {"reason": _REASONS[finish]}}


def failed(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """The same for one that broke off."""
    return {"status": "failed", "error": error_of(refusal, request_id)}


def error_of(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """Its code is one of the API's own, which are few."""
    limited = DIALECTS[refusal.code][0] == _RATE_LIMITED
    code = "rate_limit_exceeded" if limited else "server_error"
    return {"code": code, "message": f"{refusal.message} (request {request_id})"}


def is_whole(finish: Finish) -> bool:
    """Whether an answer that ended so is all that the model had to say."""
    return finish not in _REASONS


def items_json(
    items: tuple[Item, ...], *, limit: int, newest_first: bool, after: str | None
) -> bytes | None:
    """A page of a response's input; None when `after` names none of them."""
    ordered = list(reversed(items)) if newest_first else list(items)
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item.id == after]
        if not places:
            return None
        start = places[0] + 1
    page = ordered[start : start + limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [item_json(item) for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(ordered) > start + len(page),
        }
    )


def deleted_json(name: str) -> bytes:
    """The body of a deletion."""
    return msgspec.json.encode({"id": name, "object": "response", "deleted": True})


def input_tokens_json(tokens: int) -> bytes:
    """The body of a count."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})
