"""A request's texts before anything is rendered from them: masked in place, or refused.

Each turn, each text within arguments of past calls, each description of a tool is a text of
its own; masking one moves the places in it that a caller wants cached, and where images are.
What an image shows is not screened.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from core.safety.policy import Rule
from core.safety.rulebook import Rulebook
from gateway.conversation import CacheBreak, Conversation, Turn
from gateway.safety.sieve import Hit, Piece, Sieve
from gateway.thinking import Thought
from gateway.toolbox import Tool, Toolbox, ToolCall

AT_ONCE_CHARS = 1_024

Tell = Callable[[Hit], None]


class BlockedError(Exception):
    """A rule refuses the request."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.name)
        self.rule = rule


class Masked(msgspec.Struct, frozen=True):
    """A text with its masks, and what it was made of: old characters, and new ones."""

    text: str
    parts: tuple[tuple[int, int], ...]  # (old, new) characters of each stretch

    def moved(self, at: int) -> int:
        """Where a place in the old text is in the new one: never within a mask."""
        new = 0
        for old_chars, new_chars in self.parts:
            if at < old_chars:
                return new + (at if old_chars == new_chars else 0)
            at -= old_chars
            new += new_chars
        return new


class InputScreen:
    """One request. Raises BlockedError wherever a rule refuses it."""

    def __init__(self, book: Rulebook, tell: Tell) -> None:
        self._book = book
        self._tell = tell

    async def conversation(self, asked: Conversation) -> Conversation:
        """The same, masked."""
        turns, breaks = await self._turns(asked)
        prompt = asked.prompt
        return msgspec.structs.replace(
            asked,
            turns=turns,
            cache_breaks=breaks,
            prompt=await self.text(prompt) if isinstance(prompt, str) else prompt,
            toolbox=await self._toolbox(asked.toolbox),
        )

    async def text(self, text: str) -> str:
        """One text."""
        return (await self._masked(text)).text

    async def _masked(self, text: str) -> Masked:
        searches = self._book.input
        logging = Sieve(self._book.rules, searches.logging)
        acting = Sieve(self._book.rules, searches.acting)
        pieces: list[Piece] = []
        for start in range(0, len(text), AT_ONCE_CHARS):
            part = text[start : start + AT_ONCE_CHARS]
            final = start + AT_ONCE_CHARS >= len(text)
            logging.feed(part, final=final)
            pieces += acting.feed(part, final=final)
            if not final:
                await asyncio.sleep(0)  # others' answers are on the same loop
        for hit in acting.hits + logging.hits:
            self._tell(hit)
        if acting.cut is not None:
            raise BlockedError(self._book.rules[acting.cut])
        return _joined(self._replaced(pieces))

    def _replaced(self, pieces: list[Piece]) -> Iterator[tuple[int, str]]:
        """Old characters and new text; neighbours that are masked become one replacement."""
        masking = False
        for piece in pieces:
            if piece.rule is None:
                yield len(piece.text), piece.text
            else:
                replacement = self._book.rules[piece.rule].replacement
                yield len(piece.text), "" if masking else replacement
            masking = piece.rule is not None

    async def _turns(self, asked: Conversation) -> tuple[tuple[Turn, ...], tuple[CacheBreak, ...]]:
        turns: list[Turn] = []
        breaks = list(asked.cache_breaks)
        for number, turn in enumerate(asked.turns, 1):
            masked = await self._masked(turn.content)
            breaks = [
                msgspec.structs.replace(each, chars=masked.moved(each.chars))
                if each.turns == number
                else each
                for each in breaks
            ]
            calls = tuple([await self._call(call) for call in turn.calls])
            images = tuple(
                msgspec.structs.replace(image, at=masked.moved(image.at)) for image in turn.images
            )
            turns.append(
                msgspec.structs.replace(
                    turn,
                    content=masked.text,
                    images=images,
                    calls=calls,
                    thoughts=await self._thoughts(turn, masked),
                )
            )
        return tuple(turns), tuple(breaks)

    async def _thoughts(self, turn: Turn, masked: Masked) -> tuple[Thought, ...]:
        """Those in which there is nothing to mask: nobody takes back a thought that was changed."""
        return tuple(
            [
                msgspec.structs.replace(thought, at=masked.moved(thought.at))
                for thought in turn.thoughts
                if await self.text(thought.text) == thought.text
            ]
        )

    async def _call(self, call: ToolCall) -> ToolCall:
        return msgspec.structs.replace(call, arguments=await self._within(call.arguments))

    async def _toolbox(self, toolbox: Toolbox | None) -> Toolbox | None:
        if toolbox is None:
            return None
        tools = tuple([await self._tool(tool) for tool in toolbox.tools])
        named = {tool.name: tool for tool in tools}
        may = tuple(named[tool.name] for tool in toolbox.callable)
        return msgspec.structs.replace(toolbox, tools=tools, callable=may)

    async def _tool(self, tool: Tool) -> Tool:
        return msgspec.structs.replace(tool, description=await self.text(tool.description))

    async def _within(self, value: Any) -> Any:
        """The texts of a JSON value, keys aside; its depth is bounded where it was read."""
        if isinstance(value, str):
            return await self.text(value)
        if isinstance(value, dict):
            return {key: await self._within(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [await self._within(inner) for inner in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value if await self.text(str(value)) == str(value) else 0
        return value


def _joined(stretches: Iterator[tuple[int, str]]) -> Masked:
    told = list(stretches)
    return Masked("".join(text for _, text in told), tuple((old, len(text)) for old, text in told))
