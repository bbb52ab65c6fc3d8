"""Messages' blocks into turns: neighbours of one role joined, each result a turn of its own."""

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.anthropic.blocks import Block, CacheBreaks
from gateway.conversation import CacheBreak, CacheTTL, Role, Turn
from gateway.images import Image, Written
from gateway.thinking import Thought
from gateway.toolbox import ToolCall, Unanswered


class _Draft:
    """A turn that may yet grow."""

    def __init__(self, role: Role, *, call_id: str = "", tool: str = "") -> None:
        self.role = role
        self.said = Written()
        self.calls: list[ToolCall] = []
        self.thoughts: list[Thought] = []
        self._call_id = call_id
        self._tool = tool

    @property
    def turn(self) -> Turn:
        return Turn(
            role=self.role,
            content=self.said.text,
            images=tuple(self.said.images),
            calls=tuple(self.calls),
            thoughts=tuple(self.thoughts),
            call_id=self._call_id,
            tool=self._tool,
        )


class Turns:
    """Raises RefusedError where calls and results do not belong together."""

    def __init__(self, breaks: CacheBreaks) -> None:
        self._breaks = breaks
        self._drafts: list[_Draft] = []
        self._unanswered = Unanswered()

    @property
    def taken(self) -> tuple[Turn, ...]:
        """All of them."""
        return tuple(draft.turn for draft in self._drafts)

    def add(self, role: Role, blocks: Sequence[Block]) -> None:
        """One message."""
        for block in blocks:
            match block.value:
                case str() | Image() as piece:
                    if role == "user":
                        self.settled(block.path)
                    self._last(role).said.add(piece)
                case Thought() as thought:
                    draft = self._last(role)
                    at, calls = draft.said.chars, len(draft.calls)
                    draft.thoughts.append(replace(thought, at=at, calls=calls))
                case ToolCall() as call:
                    self._unanswered.called(call, block.path)
                    self._last(role).calls.append(call)
                case result:
                    tool = self._unanswered.answered(result.call_id, block.path)
                    draft = _Draft("tool", call_id=result.call_id, tool=tool)
                    draft.said = result.content
                    self._drafts.append(draft)
            if block.ttl is not None:
                self._breaks.add(block.fields, self.end(block.ttl))

    def settled(self, path: str) -> None:
        """Results of calls come before anything else. Raises RefusedError when one is missing."""
        self._unanswered.settled(path)

    def end(self, ttl: CacheTTL) -> CacheBreak:
        """A mark after what there is so far."""
        last = self._drafts[-1]
        return CacheBreak(
            ttl=ttl,
            turns=len(self._drafts),
            chars=last.said.chars,
            images=len(last.said.images),
            calls=len(last.calls),
        )

    def _last(self, role: Role) -> _Draft:
        if not self._drafts or self._drafts[-1].role != role:
            self._drafts.append(_Draft(role))
        return self._drafts[-1]
