"""Ids for the calls of one conversation, as its provider is told them: counted from 0.

A function of the conversation, so that a longer one begins with the same words and a provider's
prompt cache knows it again.
"""

from gateway.conversation import Turn
from gateway.toolbox import ToolCall


class CallIds:
    """Used in the order of the turns. Results name calls of the turn before them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._given: dict[str, str] = {}

    def called(self, call: ToolCall) -> str:
        """A new id; a later call may have had the same one from the caller."""
        given = self._given[call.id] = f"{self._prefix}_{self._count}"
        self._count += 1
        return given

    def answered(self, result: Turn) -> str:
        """The id of the call that this is the result of."""
        return self._given[result.call_id]
