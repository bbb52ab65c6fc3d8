"""What a request says of thinking, and what its past turns thought.

The API names an effort alone. What was thought stands beside a message's content, as DeepSeek,
vLLM and others name it; nobody signs it there.
"""

from gateway.fields import Fields
from gateway.thinking import EFFORTS, Display, Thinking, Thought

NONE = "none"
FIELD = "reasoning_content"  # as answers tell it
ALIAS = "reasoning"  # vLLM's newer name


def read_effort(fields: Fields, name: str, *, display: Display | None = None) -> Thinking | None:
    """Take it. Raises RefusedError."""
    told = fields.choice(name, NONE, *EFFORTS)
    if told is None and display is None:
        return None
    if told == NONE:
        return Thinking(mode="off", display=display)
    effort = next((each for each in EFFORTS if each == told), None)
    return Thinking(
        mode="unsaid" if effort is None else "adaptive",
        effort=effort,
        display=display,
        asked=() if effort is None else (fields.at(name),),
    )


def read_thoughts(message: Fields) -> tuple[Thought, ...]:
    """Take an assistant's, under either name. Raises RefusedError."""
    told, other = message.text(FIELD), message.text(ALIAS)
    text = told or other
    return (Thought(text=text),) if text else ()
