"""What goes into a chat prompt, and the refusals that turning text into ids may end in."""

import msgspec

# The roles that published chat templates know. Templates that build a control token from the
# role (`'<|' + role + '|>'`) would let any other role name one.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn. `content` is untrusted text; `role` is one of ROLES."""

    role: str
    content: str


class TextRefusedError(Exception):
    """This text cannot be turned into ids; the message is fit for the caller's eyes."""


class TemplateRefusedError(TextRefusedError):
    """The model's chat template is missing, or does not take these messages."""
