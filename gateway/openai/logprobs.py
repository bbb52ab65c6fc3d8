r"""Log probabilities in both of OpenAI's shapes.

Chat has a list of objects, legacy completions have four parallel lists. A token need not be
whole characters: its text is then `bytes:\xf0\x9f`, as the legacy interface has always
written it, so that two such tokens never share a name.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.conversation import PromptToken, TokenChance

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


def prompt_logprobs(prompt: Sequence[PromptToken], count: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has it: for each token a map of ids, itself among them.

    The rank of a token that is not one of the `count` likeliest is not known.
    """
    return [None if one.logprob is None else _by_id(one, one.logprob, count) for one in prompt]


def _by_id(one: PromptToken, logprob: float, count: int) -> dict[str, Any]:
    told = {
        str(id_): {"logprob": _finite(value), "rank": rank, "decoded_token": _text(token)}
        for rank, (id_, token, value) in enumerate(one.top[:count], 1)
    }
    itself = {"logprob": _finite(logprob), "rank": None, "decoded_token": _text(one.token)}
    return {str(one.id): itself, **told}


class CompletionLogprobs:
    """Writes `logprobs` of one legacy choice, chunk after chunk: offsets run through it."""

    def __init__(self) -> None:
        self._decoder = _utf8(errors="replace")
        self._chars = 0  # whole characters so far

    def write_prompt(self, prompt: Sequence[PromptToken], count: int) -> dict[str, Any]:
        """The same for a prompt that is echoed, `count` likeliest of each."""
        chances = [
            TokenChance(
                token=one.token,
                logprob=one.logprob or 0.0,
                top=tuple((token, logprob) for _, token, logprob in one.top[:count]),
            )
            for one in prompt
        ]
        told = self.write(chances)
        # The first stands after nothing, so nothing is known of it.
        for name in ("token_logprobs", "top_logprobs"):
            told[name] = [None, *told[name][1:]]
        return told

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
