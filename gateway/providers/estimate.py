"""How many tokens a text may be to a tokenizer that we do not have.

Only until the provider tells: for reserving money, for limits, and for what a stream that was
cut came to. Bytes are counted by kind and weighed, in fortieths of a token:

    lower-case letters 10    capitals, digits 24    white space 4
    other ASCII 30           bytes beyond ASCII 24

Beside SmolLM2's 49,152 tokens, fewer than providers have, that makes 1.15 to 1.25 times as many
of English prose, 1.0 of Markdown, code and JSON, 1.05 to 1.35 of Chinese with Japanese, Russian
and Arabic, 0.8 of emoji (November 2026). What has no words (base64, hex, random letters) is
weighed again as a prompt, for it would come to half. Never more than the bytes, which no
byte-level vocabulary exceeds.
"""

import string
from collections.abc import Iterable

import msgspec

from gateway.conversation import Conversation, Turn
from gateway.images import Detail
from gateway.toolbox import Tool

PART = 40
_WEIGHTS = (
    (string.ascii_lowercase.encode(), 10),
    (string.ascii_uppercase.encode() + string.digits.encode(), 24),
    (string.whitespace.encode() + b"\x00", 4),
    (bytes(range(128, 256)), 24),
)
_OTHER_WEIGHT = 30

_RUNS = (string.ascii_letters + string.digits).encode()
_RUN_CHARS_MAX = 16  # of the words of any language or program, on average
_RUN_BYTES_MIN = 64  # a short text may be one word
_RUN_WEIGHT = 28

# What an image comes to, whatever its size, which nobody here looks at: 768 lines of OpenAI's
# tiles are 765, and a picture that Anthropic does not scale down is up to 1,568 (November 2026).
IMAGE_TOKENS = 1_600
IMAGE_LOW_TOKENS = 85
IMAGE_ORIGINAL_TOKENS = 4_800

TURN_TOKENS = 6  # its role and what surrounds it
CALL_TOKENS = 16
TOOL_TOKENS = 16
TOOLS_TOKENS = 350  # what providers say of tools at all: Anthropic documents 313 to 346
PROMPT_TOKENS = 16


_IMAGE_TOKENS: dict[Detail, int] = {
    "auto": IMAGE_TOKENS,
    "low": IMAGE_LOW_TOKENS,
    "high": IMAGE_TOKENS,
    "original": IMAGE_ORIGINAL_TOKENS,
}


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
    text = max(text_tokens(turn.content), _wordless_tokens(turn.content))
    images = sum(_IMAGE_TOKENS[image.detail] for image in turn.images)
    thoughts = sum(text_tokens(thought.text) for thought in turn.thoughts)
    return TURN_TOKENS + text + images + thoughts + calls


def _wordless_tokens(text: str) -> int:
    """Of letters and digits without end; 0 for a text of words."""
    raw = text.encode(errors="surrogatepass")
    breaks = len(raw.translate(None, _RUNS))
    runs = len(raw) - breaks
    if runs < _RUN_BYTES_MIN or runs <= breaks * _RUN_CHARS_MAX:
        return 0
    return -(-runs * _RUN_WEIGHT // PART)


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
