"""The Responses API of the OpenAI dialect: bodies in, bodies and frames out. Pure.

Its errors, limits' headers and models are the dialect's own. What it keeps for
`previous_response_id` is `gateway.items`; where that is kept is nobody's business here.
"""

from gateway.responses.answer import (
    answer_items,
    deleted_json,
    input_tokens_json,
    items_json,
    response_id,
    response_json,
)
from gateway.responses.items import named
from gateway.responses.request import continued, parse_input_tokens, parse_response
from gateway.responses.shortening import beginnings, begun_at, is_too_long, room_for
from gateway.responses.stream import ResponsesStream

__all__ = [
    "ResponsesStream",
    "answer_items",
    "beginnings",
    "begun_at",
    "continued",
    "deleted_json",
    "input_tokens_json",
    "is_too_long",
    "items_json",
    "named",
    "parse_input_tokens",
    "parse_response",
    "response_id",
    "response_json",
    "room_for",
]
