"""The Anthropic dialect: bodies in, bodies, frames and headers out. Pure.

Two differences from the rest of the gateway are settled here and nowhere else: cached tokens
are told beside `input_tokens`, not within it, and a full house is 529, not 503.
"""

from gateway.anthropic.answer import count_tokens_json, message_json
from gateway.anthropic.errors import error_body
from gateway.anthropic.limits import limit_headers
from gateway.anthropic.models import model_json, models_json
from gateway.anthropic.request import parse_count_tokens, parse_messages
from gateway.anthropic.stream import AnthropicStream
from gateway.anthropic.usage import from_usage, to_usage

__all__ = [
    "AnthropicStream",
    "count_tokens_json",
    "error_body",
    "from_usage",
    "limit_headers",
    "message_json",
    "model_json",
    "models_json",
    "parse_count_tokens",
    "parse_messages",
    "to_usage",
]
