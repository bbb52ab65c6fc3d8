"""The OpenAI dialect: bodies in, bodies, frames and headers out. Pure.

A chunk of one stream differs from the next only in its choice: everything around it is
encoded once, when the stream's writer is made.
"""

from gateway.openai.answer import chat_json, completion_json
from gateway.openai.chat_request import parse_chat
from gateway.openai.completion_request import parse_completion
from gateway.openai.errors import error_body
from gateway.openai.limits import limit_headers
from gateway.openai.models import model_json, models_json
from gateway.openai.stream import OpenAIChatStream, OpenAICompletionStream
from gateway.openai.usage import from_usage, to_usage

__all__ = [
    "OpenAIChatStream",
    "OpenAICompletionStream",
    "chat_json",
    "completion_json",
    "error_body",
    "from_usage",
    "limit_headers",
    "model_json",
    "models_json",
    "parse_chat",
    "parse_completion",
    "to_usage",
]
