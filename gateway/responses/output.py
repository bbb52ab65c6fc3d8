"""An answer's items as they come: texts, thoughts and calls, in the order in which they are told.

A message opens with its first text, so that an empty answer has no item; each call is an item of
its own, and so is each thought, which its signature ends. Names are a function of the request,
so that every telling has the same.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.conversation import AnswerChoice, CallStart, Delta, TokenChance, told_between
from gateway.items import Ask, CallItem, Item, MessageItem, ReasoningItem
from gateway.openai.answer import CALL_PREFIX
from gateway.openai.logprobs import chat_logprobs
from gateway.responses.items import item_json
from gateway.thinking import Thought
from gateway.tools.ids import call_id


class OutputItem:
    """One item, of which there may be more to come."""

    def __init__(self, item: Item, index: int, ask: Ask) -> None:
        self.item = item
        self.index = index
        self._ask = ask
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def id(self) -> str:
        """Its name."""
        return self.item.id

    @property
    def text(self) -> str:
        """Of a message or a thought, or the arguments of a call."""
        return "".join(self.pieces)

    def sign(self, signature: str) -> None:
        """A thought has its signature."""
        assert isinstance(self.item, ReasoningItem)
        self.item = msgspec.structs.replace(self.item, signature=signature)

    def whole(self, *, whole: bool) -> Item:
        """The item when it is over."""
        if isinstance(self.item, CallItem):
            return CallItem(
                id=self.id,
                call_id=self.item.call_id,
                name=self.item.name,
                arguments=self.text,
                whole=whole,
            )
        if isinstance(self.item, ReasoningItem):
            ended = whole or bool(self.item.signature or self.item.redacted)
            return msgspec.structs.replace(self.item, text=self.text, whole=ended)
        return MessageItem(id=self.id, role="assistant", parts=(self.text,), whole=whole)

    def json(self, *, whole: bool) -> dict[str, Any]:
        """The same as the API tells it."""
        ask = self._ask
        item = self.whole(whole=whole)
        told = item_json(item, shown=ask.shows_thoughts, sealed=ask.seals_thoughts)
        for part in told.get("content", ()):
            part["logprobs"] = self.logprobs
        return told


class Output:
    """The items of one answer. At most the last is open."""

    def __init__(self, request_id: str, ask: Ask) -> None:
        self._ask = ask
        self._request_id = request_id
        self._core = request_id.removeprefix("req_")
        self.items: list[OutputItem] = []

    def message(self) -> OutputItem:
        """A message begins."""
        number = len(self.items)
        item = MessageItem(id=f"msg_{self._core}_{number}", role="assistant", parts=())
        return self._add(item)

    def thought(self, redacted: str = "") -> OutputItem:
        """A thought begins, or comes whole and sealed."""
        name = f"rs_{self._core}_{len(self.items)}"
        return self._add(ReasoningItem(id=name, redacted=redacted))

    def call(self, event: CallStart) -> OutputItem:
        """A call begins."""
        named = call_id(CALL_PREFIX, self._request_id, choice=0, call=event.call)
        number = len(self.items)
        item = CallItem(
            id=f"fc_{self._core}_{number}", call_id=named, name=event.name, arguments=""
        )
        return self._add(item)

    def said(self, *, whole: bool) -> tuple[Item, ...]:
        """All of them, over. Of an answer that was cut off, the last was."""
        return tuple(each.whole(whole=whole or each is not self.items[-1]) for each in self.items)

    def json(self, *, whole: bool) -> list[dict[str, Any]]:
        """The same as the API tells them."""
        return [each.json(whole=whole or each is not self.items[-1]) for each in self.items]

    def _add(self, item: Item) -> OutputItem:
        added = OutputItem(item, len(self.items), self._ask)
        self.items.append(added)
        return added


def logprobs_json(chances: Iterable[TokenChance]) -> list[dict[str, Any]]:
    """Of some tokens of a message."""
    content: list[dict[str, Any]] = chat_logprobs(tuple(chances))["content"]
    return content


def output_of(choice: AnswerChoice, request_id: str, ask: Ask) -> Output:
    """The items of an answer that is whole."""
    output = Output(request_id, ask)
    start = calls = 0
    chances = choice.chances or ()
    for told in told_between(choice):
        _say(output, Delta(choice=0, text=choice.text[start : told.at]))
        start = told.at
        if isinstance(told, Thought):
            item = output.thought(told.redacted)
            item.pieces.append(told.text)
            item.sign(told.signature)
        else:
            item = output.call(CallStart(choice=0, call=calls, name=told.name))
            item.pieces.append(told.arguments)
            calls += 1
    _say(output, Delta(choice=0, text=choice.text[start:], chances=chances))
    return output


def _say(output: Output, event: Delta) -> None:
    if event.text or event.chances:
        item = output.message()
        item.pieces.append(event.text)
        item.logprobs += logprobs_json(event.chances)
