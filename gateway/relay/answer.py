"""What an answer consists of so far: for resuming it elsewhere, and for telling its totals."""

import msgspec

from core.protocol import Choice, Tokens


class ChoiceSoFar(msgspec.Struct):
    """One choice: every id accepted from any attempt, and the characters passed on."""

    index: int
    ids: list[int] = msgspec.field(default_factory=list)
    chars: int = 0
    ended: bool = False
    by_length: bool = False


class AnswerSoFar:
    """All choices of one request."""

    def __init__(self, choices: int) -> None:
        self._choices = [ChoiceSoFar(index) for index in range(choices)]
        self.output_tokens = 0

    def take(self, tokens: Tokens) -> bool:
        """Accept a frame; false for one about a choice that is not open."""
        if not 0 <= tokens.choice < len(self._choices):
            return False
        choice = self._choices[tokens.choice]
        if choice.ended:
            return False
        choice.ids += tokens.ids
        choice.chars += len(tokens.text)
        self.output_tokens += len(tokens.ids)
        if tokens.finish is not None:
            choice.ended = True
            choice.by_length = tokens.finish == "length"
        return True

    @property
    def begun(self) -> bool:
        """Whether another attempt would have to resume rather than start."""
        return self.output_tokens > 0

    @property
    def by_length(self) -> bool:
        """Whether any choice ended for want of room."""
        return any(choice.by_length for choice in self._choices)

    def open(self) -> tuple[int, ...]:
        """Choices not ended yet."""
        return tuple(choice.index for choice in self._choices if not choice.ended)

    def to_resume(self) -> tuple[Choice, ...]:
        """The open choices, as the next attempt is told of them."""
        return tuple(
            Choice(index=choice.index, output_ids=tuple(choice.ids), released_chars=choice.chars)
            for choice in self._choices
            if not choice.ended
        )
