"""How much a model is to think before it answers, and what it thought: said in any dialect.

    OpenAI      reasoning_effort, reasoning.effort     none … max
    Anthropic   thinking, output_config.effort         off, so many tokens, as the model likes

A thought has its place in its turn, after so many characters and calls. Its signature is its
provider's, which takes a thought back only as it was; so it is kept beside the text, unread.
"""

from typing import Literal

import msgspec

from core.errors import Code, refuse

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = ("minimal", "low", "medium", "high", "xhigh", "max")
Mode = Literal["unsaid", "off", "adaptive", "budget", "between_tools"]
Display = Literal["summarized", "omitted"]

BUDGET_MIN = 1_024

# What a budget comes to where only efforts are known: up to so many tokens.
_EFFORT_OF: tuple[tuple[int, Effort], ...] = ((4_095, "low"), (16_383, "medium"))


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of it. `asked` are the fields that ask for anything but none."""

    mode: Mode = "unsaid"
    effort: Effort | None = None
    budget_tokens: int = 0
    display: Display | None = None
    asked: tuple[str, ...] = ()


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of it: its text and signature, or what only its provider can read."""

    text: str = ""
    signature: str = ""
    redacted: str = ""
    at: int = 0
    calls: int = 0


class Thoughts:
    """A choice's, gathered as they come."""

    def __init__(self) -> None:
        self._whole: list[Thought] = []
        self._pieces: list[str] = []  # of one that may go on
        self._place: tuple[int, int] | None = None  # of that one

    def take(self, text: str, signature: str, redacted: str, *, at: int, calls: int) -> None:
        """More of the last, or the first of another: a signature ends one, and so does a place."""
        if not (text or signature or redacted):
            return
        if self._place != (at, calls) or redacted:
            self._close()
        if redacted:
            self._whole.append(Thought(redacted=redacted, at=at, calls=calls))
            return
        self._place = (at, calls)
        self._pieces.append(text)
        if signature:
            self._close(signature)

    @property
    def all(self) -> tuple[Thought, ...]:
        """When there is no more."""
        self._close()
        return tuple(self._whole)

    def _close(self, signature: str = "") -> None:
        if self._place is not None:
            at, calls = self._place
            text = "".join(self._pieces)
            self._whole.append(Thought(text=text, signature=signature, at=at, calls=calls))
        self._pieces, self._place = [], None


def effort_of(thinking: Thinking) -> Effort | None:
    """As a word, where a budget is none."""
    if thinking.effort is not None or thinking.mode != "budget":
        return thinking.effort
    return next((e for most, e in _EFFORT_OF if thinking.budget_tokens <= most), "high")


def refuse_thinking(thinking: Thinking | None, model: str) -> None:
    """Raises RefusedError where anything is asked: this model answers at once."""
    if thinking is not None and thinking.asked:
        param = thinking.asked[0]
        message = f"{param}: the model '{model}' does not reason before it answers; leave it out"
        raise refuse(Code.UNSUPPORTED, message, param=param)
