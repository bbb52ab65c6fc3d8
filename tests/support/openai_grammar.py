"""Strict state machines of OpenAI's two event streams, over recorded bytes.

    chat        role chunk of each choice, (content | call | finish)*, [usage chunk], [DONE]
    completions (text | finish)*, [usage chunk], [DONE]
    either      error frame at any point before [DONE], and then nothing

Written from the interface's description, not from our writer. A check returns what a client
would have gathered, or raises GrammarError with the reason.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tests.support.sse_frames import Frame, expect, expect_count, expect_keys, parse, split

FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}
USAGE_KEYS = {
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
}


@dataclass
class Summary:
    """What the stream said. `error` is the error object; `done` is whether [DONE] came."""

    texts: list[str]
    finishes: list[str | None]
    logprobs: list[list[dict[str, Any]]]
    calls: list[list[dict[str, str]]]  # id, name and arguments of each
    thoughts: list[str]
    id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    comments: int = 0


def check_openai_chat_stream(
    raw: bytes, *, include_usage: bool, n: int = 1, cut: bool = False
) -> Summary:
    """`cut`: the client left, so that any prefix of a legal stream will do."""
    return _Chat(include_usage=include_usage, n=n).run(raw, cut=cut)


def check_openai_completion_stream(
    raw: bytes, *, include_usage: bool, n: int = 1, cut: bool = False
) -> Summary:
    """As `check_openai_chat_stream`."""
    return _Completion(include_usage=include_usage, n=n).run(raw, cut=cut)


@dataclass
class _Machine(ABC):
    include_usage: bool
    n: int
    summary: Summary = field(init=False)
    created: int | None = None
    tier: str | None = None

    object_name = ""
    id_prefix = ""

    def __post_init__(self) -> None:
        self.summary = Summary(
            texts=[""] * self.n,
            finishes=[None] * self.n,
            logprobs=[[] for _ in range(self.n)],
            calls=[[] for _ in range(self.n)],
            thoughts=[""] * self.n,
        )

    def run(self, raw: bytes, *, cut: bool) -> Summary:
        for frame in split(raw, cut=cut):
            self.step(frame)
        whole = self.summary.done or self.summary.error is not None
        expect(cut or whole, "the stream ends without [DONE] and without an error")
        return self.summary

    def step(self, frame: Frame) -> None:
        expect(not self.summary.done, f"a frame after [DONE]: {frame}")
        expect(self.summary.error is None, f"a frame after an error: {frame}")
        if frame.comment is not None:
            self.summary.comments += 1
            return
        expect(frame.event is None, f"a named event: {frame}")
        if frame.data == "[DONE]":
            self.finish()
            return
        value = parse(frame.data)
        if "error" in value:
            self.fail(value)
        else:
            self.chunk(value)

    def finish(self) -> None:
        expect(self.all_ended(), f"[DONE] before every choice ended: {self.summary.finishes}")
        if self.include_usage:
            expect(self.summary.usage is not None, "[DONE] without the usage chunk asked for")
        self.summary.done = True

    def fail(self, value: dict[str, Any]) -> None:
        expect_keys(value, {"error"}, "an error frame")
        error = value["error"]
        expect_keys(error, {"message", "type", "param", "code"}, "error")
        expect(bool(error["message"]), "error.message is empty")
        for name in ("message", "type", "code"):
            expect(isinstance(error[name], str), f"error.{name} is not a string: {error}")
        self.summary.error = error

    def chunk(self, value: dict[str, Any]) -> None:
        keys = {"id", "object", "created", "model", "choices"}
        keys |= {"service_tier"} & set(value)  # of who named one
        expect_keys(value, keys | ({"usage"} if self.include_usage else set()), "a chunk")
        expect(value["object"] == self.object_name, f"object is {value['object']!r}")
        self.same_head(value)
        expect(self.summary.usage is None, "a chunk after the usage chunk")
        if value["choices"] == []:
            self.usage(value)
            return
        if self.include_usage:
            expect(value["usage"] is None, f"usage before the usage chunk: {value['usage']!r}")
        expect(len(value["choices"]) == 1, f"{len(value['choices'])} choices in a chunk")
        self.choice(value["choices"][0])

    def same_head(self, value: dict[str, Any]) -> None:
        if self.summary.id is None:
            expect(str(value["id"]).startswith(self.id_prefix), f"id is {value['id']!r}")
            expect_count(value["created"], "created")
            expect(bool(value["model"]), "model is empty")
            self.summary.id, self.summary.model = value["id"], value["model"]
            self.created = value["created"]
            self.tier = value.get("service_tier")
            expect(self.tier in {None, "default", "flex", "priority"}, f"tier is {self.tier!r}")
        head = (value["id"], value["model"], value["created"], value.get("service_tier"))
        expected = (self.summary.id, self.summary.model, self.created, self.tier)
        expect(head == expected, f"the head changed from {expected} to {head}")

    def usage(self, value: dict[str, Any]) -> None:
        expect(self.include_usage, "a chunk without choices, though usage was not asked for")
        expect(self.all_ended(), "the usage chunk comes before every choice ended")
        usage = value["usage"]
        if "headworks" in usage:
            expect_keys(usage["headworks"], {"cost_micro", "currency"}, "headworks")
            expect_count(usage["headworks"]["cost_micro"], "cost_micro")
        expect_keys(usage, USAGE_KEYS | ({"headworks"} & set(usage)), "usage")
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage["prompt_tokens_details"]
        cached = details["cached_tokens"] + details.get("cache_write_tokens", 0)
        for name, count in (("prompt", prompt), ("completion", completion), ("cached", cached)):
            expect_count(count, name)
        expect(usage["total_tokens"] == prompt + completion, f"total_tokens is off: {usage}")
        expect(
            cached <= prompt, f"cached_tokens is over prompt_tokens with what was written: {usage}"
        )
        self.summary.usage = usage

    @abstractmethod
    def choice(self, choice: dict[str, Any]) -> None: ...

    def index(self, choice: dict[str, Any]) -> int:
        index: int = choice["index"]
        expect(type(index) is int and 0 <= index < self.n, f"index is {index!r}")
        expect(self.summary.finishes[index] is None, f"choice {index} goes on after its end")
        return index

    def end(self, index: int, reason: Any) -> None:
        expect(reason in FINISH_REASONS, f"finish_reason is {reason!r}")
        self.summary.finishes[index] = reason

    def all_ended(self) -> bool:
        return None not in self.summary.finishes


class _Chat(_Machine):
    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun: set[int] = set()

    def choice(self, choice: dict[str, Any]) -> None:
        expect_keys(choice, {"index", "delta", "logprobs", "finish_reason"}, "a choice")
        index = self.index(choice)
        delta = choice["delta"]
        if index not in self.begun:
            first = {"role": "assistant", "content": ""}
            expect(delta == first, f"choice {index} begins with {delta!r}")
            expect(choice["finish_reason"] is None, "the role chunk has a finish_reason")
            expect(choice["logprobs"] is None, "the role chunk has logprobs")
            self.begun.add(index)
        elif choice["finish_reason"] is not None:
            expect(delta == {}, f"the last chunk of choice {index} has a delta: {delta!r}")
            expect(choice["logprobs"] is None, "the last chunk has logprobs")
            called = bool(self.summary.calls[index])
            expect(
                choice["finish_reason"] != "tool_calls" or called,
                f"choice {index} ends for calls it has not made",
            )
            self.end(index, choice["finish_reason"])
        elif "tool_calls" in delta:
            expect(choice["logprobs"] is None, "a call has logprobs")
            self.call(index, delta)
        elif "reasoning_content" in delta:
            expect_keys(delta, {"reasoning_content"}, "delta")
            expect(choice["logprobs"] is None, "a thought has logprobs")
            expect(bool(delta["reasoning_content"]), "a chunk that says nothing")
            self.summary.thoughts[index] += delta["reasoning_content"]
        else:
            self.content(index, delta, choice["logprobs"])

    def call(self, index: int, delta: Any) -> None:
        expect_keys(delta, {"tool_calls"}, "delta")
        expect(len(delta["tool_calls"]) == 1, "more than one call in a chunk")
        (call,) = delta["tool_calls"]
        calls = self.summary.calls[index]
        if call["index"] == len(calls):
            expect_keys(call, {"index", "id", "type", "function"}, "the start of a call")
            expect(call["type"] == "function", f"a call's type is {call['type']!r}")
            expect(call["id"].startswith("call_"), f"a call's id is {call['id']!r}")
            expect(all(call["id"] != other["id"] for other in calls), "two calls have one id")
            function = call["function"]
            expect_keys(function, {"name", "arguments"}, "function")
            expect(bool(function["name"]), "a call without a name")
            expect(function["arguments"] == "", "a call begins with arguments")
            calls.append({"id": call["id"], "name": function["name"], "arguments": ""})
            return
        expect(call["index"] == len(calls) - 1, f"call {call['index']} after {len(calls)} calls")
        expect_keys(call, {"index", "function"}, "more of a call")
        expect_keys(call["function"], {"arguments"}, "function")
        expect(bool(call["function"]["arguments"]), "a chunk that says nothing")
        calls[-1]["arguments"] += call["function"]["arguments"]

    def content(self, index: int, delta: Any, logprobs: Any) -> None:
        expect_keys(delta, {"content"}, "delta")
        expect(isinstance(delta["content"], str), f"content is {delta['content']!r}")
        expect(bool(delta["content"]) or logprobs is not None, "a chunk that says nothing")
        self.summary.texts[index] += delta["content"]
        if logprobs is None:
            return
        expect_keys(logprobs, {"content", "refusal"}, "logprobs")
        expect(bool(logprobs["content"]), "logprobs of no token")
        for token in logprobs["content"]:
            expect_keys(token, {"token", "logprob", "bytes", "top_logprobs"}, "a token")
            for other in token["top_logprobs"]:
                expect_keys(other, {"token", "logprob", "bytes"}, "a top token")
        self.summary.logprobs[index] += logprobs["content"]


class _Completion(_Machine):
    object_name = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, choice: dict[str, Any]) -> None:
        expect_keys(choice, {"index", "text", "logprobs", "finish_reason"}, "a choice")
        index = self.index(choice)
        text, logprobs = choice["text"], choice["logprobs"]
        expect(isinstance(text, str), f"text is {text!r}")
        self.summary.texts[index] += text
        if logprobs is not None:
            self.tokens(index, logprobs)
        if choice["finish_reason"] is not None:
            self.end(index, choice["finish_reason"])
        else:
            expect(bool(text) or logprobs is not None, "a chunk that says nothing")

    def tokens(self, index: int, logprobs: Any) -> None:
        lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        expect_keys(logprobs, set(lists), "logprobs")
        counts = {len(logprobs[name]) for name in lists}
        expect(len(counts) == 1 and counts != {0}, f"logprobs lists differ in length: {logprobs}")
        before = self.summary.logprobs[index]
        offsets = [token["text_offset"] for token in before] + logprobs["text_offset"]
        expect(offsets == sorted(offsets), f"text_offset goes back: {offsets}")
        rows = zip(*(logprobs[name] for name in lists), strict=True)
        before += [dict(zip(lists, row, strict=True)) for row in rows]
