"""What `truncation: "auto"` leaves out of a conversation that does not fit: its oldest turns.

What is left begins with something the user says, so that no result is parted from its call. The
system's words at the beginning stay, and so does the last thing the user says.
"""

from msgspec.structs import replace

from core.errors import Code, RefusedError
from gateway.conversation import Conversation


def room_for(context_tokens: int, max_tokens: int | None) -> int:
    """Of the prompt: what the answer may need is kept free, up to half of the context.

    An answer without a bound may need a quarter.
    """
    answer = context_tokens // 4 if max_tokens is None else max_tokens
    return context_tokens - min(answer, context_tokens // 2)


def beginnings(conversation: Conversation) -> tuple[int, ...]:
    """The turns with which it may begin after the system's: fewer and fewer are left."""
    head = _head(conversation)
    later = (i for i, turn in enumerate(conversation.turns) if i > head and turn.role == "user")
    return (head, *later)


def begun_at(conversation: Conversation, place: int) -> Conversation:
    """Without what is between the system's words and this turn."""
    turns = conversation.turns
    return replace(conversation, turns=turns[: _head(conversation)] + turns[place:])


def is_too_long(error: RefusedError) -> bool:
    """Whether a prompt was refused for its length alone."""
    return error.refusal.code is Code.CONTEXT_LENGTH


def _head(conversation: Conversation) -> int:
    """How many of the system's turns it begins with."""
    for i, turn in enumerate(conversation.turns):
        if turn.role != "system":
            return i
    return max(0, len(conversation.turns) - 1)
