"""How many tokens a text may be to a tokenizer that we do not have.

Only until the provider tells: for reserving money, for limits, and for what a stream that was
cut came to. Bytes are counted by kind and weighed, in fortieths of a token:

    lower-case letters 10    capitals, digits 20    white space 4
    other ASCII 28           bytes beyond ASCII 20

English prose then comes to about 1.15 times what current vocabularies make of it, code and
JSON to 1.0 to 1.4, CJK to 1.1 to 1.9: over rather than under, and never more than the bytes, which
no byte-level vocabulary exceeds.
"""

import string
from collections.abc import Iterable

import msgspec

from gateway.conversation import Conversation, Turn
from gateway.toolbox import Tool

PART = 40
_WEIGHTS = (
    (string.ascii_lowercase.encode(), 10),
    (string.ascii_uppercase.encode() + string.digits.encode(), 20),
    (string.whitespace.encode() + b"\x00", 4),
    (bytes(range(128, 256)), 20),
)
_OTHER_WEIGHT = 28

TURN_TOKENS = 6  # its role and what surrounds it
CALL_TOKENS = 16
TOOL_TOKENS = 16
TOOLS_TOKENS = 350  # what providers say of tools at all: Anthropic documents 313 to 346
PROMPT_TOKENS = 16


def text_tokens(text: str) -> int:
    """0 for an empty text, else at least 1."""
    return -(-text_weight(text) // PART)


def text_weight(text: str) -> int:
    """The same in fortieths of a token, so that a text in pieces weighs what the whole does."""
    raw = text.encode(errors="surrogatepass")
    left, weight = len(raw), 0
    for kind, each in _WEIGHTS:
        count = len(raw) - len(raw.translate(None, kind))
        left -= count
        weight += count * each
    return weight + left * _OTHER_WEIGHT


def prompt_tokens(conversation: Conversation) -> int:
    """Of all that goes into the prompt."""
    total = PROMPT_TOKENS + sum(map(_turn_tokens, conversation.turns))
    if conversation.toolbox is not None:
        total += TOOLS_TOKENS + _tools_tokens(conversation.toolbox.tools)
    if conversation.grammar is not None:
        total += text_tokens(conversation.grammar.text)
    return total


def _turn_tokens(turn: Turn) -> int:
    calls = sum(
        CALL_TOKENS + text_tokens(call.name) + _json_tokens(call.arguments) for call in turn.calls
    )
    return TURN_TOKENS + text_tokens(turn.content) + calls


def _tools_tokens(tools: Iterable[Tool]) -> int:
    return sum(
        TOOL_TOKENS
        + text_tokens(tool.name)
        + text_tokens(tool.description)
        + _json_tokens(tool.parameters)
        for tool in tools
    )


def _json_tokens(value: object) -> int:
    return text_tokens(msgspec.json.encode(value).decode())
