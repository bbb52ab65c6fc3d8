r"""Log probabilities in both of OpenAI's shapes.

Chat has a list of objects, legacy completions have four parallel lists. A token need not be
whole characters: its text is then `bytes:\xf0\x9f`, as the legacy interface has always
written it, so that two such tokens never share a name.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.conversation import TokenChance

LOGPROB_MIN = -9999.0  # stands for "never": JSON has no infinity

_utf8 = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(chances: Sequence[TokenChance]) -> dict[str, Any]:
    """`logprobs` of a chat choice or of one chunk of it."""
    return {
        "content": [
            {
                **_likelihood(chance.token, chance.logprob),
                "top_logprobs": [_likelihood(token, logprob) for token, logprob in chance.top],
            }
            for chance in chances
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Writes `logprobs` of one legacy choice, chunk after chunk: offsets run through it."""

    def __init__(self) -> None:
        self._decoder = _utf8(errors="replace")
        self._chars = 0  # whole characters so far

    def write(self, chances: Sequence[TokenChance]) -> dict[str, Any]:
        """The four lists for the next tokens. Offsets count characters of the choice's text."""
        return {
            "tokens": [_text(chance.token) for chance in chances],
            "token_logprobs": [_finite(chance.logprob) for chance in chances],
            "top_logprobs": [_top(chance) for chance in chances],
            "text_offset": [self._offset(chance.token) for chance in chances],
        }

    def _offset(self, token: bytes) -> int:
        # A token that begins inside a character has that character's offset.
        offset = self._chars
        self._chars += len(self._decoder.decode(token))
        return offset


def _top(chance: TokenChance) -> dict[str, float] | None:
    if not chance.top:
        return None
    likeliest = {_text(token): _finite(logprob) for token, logprob in chance.top}
    return {**likeliest, _text(chance.token): _finite(chance.logprob)}


def _likelihood(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": _finite(logprob), "bytes": list(token)}


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)
