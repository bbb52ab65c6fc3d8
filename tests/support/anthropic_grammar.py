"""A strict state machine of Anthropic's event stream, over recorded bytes.

    message_start (content_block_start content_block_delta+ content_block_stop)*
        where a block that is sealed has no delta, and nothing follows a signature
        message_delta message_stop
    `ping` anywhere after message_start; `error` at any point before message_stop, then nothing

Written from the interface's description, not from our writer. The check returns what a client
would have gathered, or raises GrammarError with the reason.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.support.sse_frames import Frame, expect, expect_count, expect_keys, parse, split

STOP_REASONS = {
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "refusal",
    "model_context_window_exceeded",
}
USAGE_KEYS = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
}
# What is no count: the tier, at the beginning, and what it cost, at the end.
USAGE_WORDS = {"service_tier", "headworks"}
TIERS = {"standard", "priority", "batch"}
# Told only where they say something: the parts of a count, and the count that they add up to.
USAGE_PARTS = {
    "cache_creation": (
        {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"},
        "cache_creation_input_tokens",
    ),
    "output_tokens_details": ({"thinking_tokens"}, "output_tokens"),
}


@dataclass
class Summary:
    """What the stream said. `error` is the inner error object; `usage` the last one told."""

    text: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None
    id: str | None = None
    model: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False
    blocks: int = 0
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name and input of each
    thoughts: list[dict[str, str]] = field(default_factory=list)  # thinking and signature
    pings: int = 0
    comments: int = 0


def check_anthropic_stream(raw: bytes, *, cut: bool = False, estimated: bool = False) -> Summary:
    """`cut`: the client left, so that any prefix of a legal stream will do.

    `estimated`: the prompt's length is known only at the end, from somebody else.
    """
    machine = _Machine(estimated=estimated)
    for frame in split(raw, cut=cut):
        machine.step(frame)
    whole = machine.summary.done or machine.summary.error is not None
    expect(cut or whole, "the stream ends without message_stop and without an error")
    return machine.summary


class _Machine:
    """`state` is the last event that counts: start, block, delta, between, ending, stopped."""

    def __init__(self, *, estimated: bool) -> None:
        self.summary = Summary()
        self.estimated = estimated
        self.state = "new"
        self.kind = ""  # of the block that is open
        self.start_usage: dict[str, int] = {}

    def step(self, frame: Frame) -> None:
        expect(not self.summary.done, f"a frame after message_stop: {frame}")
        expect(self.summary.error is None, f"a frame after an error: {frame}")
        if frame.comment is not None:
            self.summary.comments += 1
            return
        expect(frame.event is not None, f"a frame without an event name: {frame}")
        value = parse(frame.data)
        expect(value.get("type") == frame.event, f"event and type differ: {frame}")
        handlers = {
            "message_start": self.message_start,
            "content_block_start": self.block_start,
            "content_block_delta": self.block_delta,
            "content_block_stop": self.block_stop,
            "message_delta": self.message_delta,
            "message_stop": self.message_stop,
            "ping": self.ping,
            "error": self.error,
        }
        expect(frame.event in handlers, f"an unknown event: {frame}")
        handlers[str(frame.event)](value)

    def message_start(self, value: dict[str, Any]) -> None:
        expect(self.state == "new", "a second message_start")
        expect_keys(value, {"type", "message"}, "message_start")
        message = value["message"]
        keys = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
        expect_keys(message, keys, "message")
        expect(message["id"].startswith("msg_"), f"id is {message['id']!r}")
        fixed = (message["type"], message["role"], message["content"])
        expect(fixed == ("message", "assistant", []), f"message begins as {fixed}")
        stops = (message["stop_reason"], message["stop_sequence"])
        expect(stops == (None, None), f"message has stopped before it began: {stops}")
        self.start_usage = self.usage(message["usage"])
        self.summary.id, self.summary.model = message["id"], message["model"]
        self.state = "between"

    def block_start(self, value: dict[str, Any]) -> None:
        expect(self.state == "between", f"content_block_start in state {self.state}")
        expect_keys(value, {"type", "index", "content_block"}, "content_block_start")
        expect(value["index"] == self.summary.blocks, f"index is {value['index']}")
        block = value["content_block"]
        self.kind = block["type"]
        if self.kind == "tool_use":
            expect_keys(block, {"type", "id", "name", "input"}, "a tool_use block")
            expect(block["id"].startswith("toolu_"), f"a call's id is {block['id']!r}")
            known = [call["id"] for call in self.summary.calls]
            expect(block["id"] not in known, "two calls have one id")
            expect(bool(block["name"]), "a call without a name")
            expect(block["input"] == {}, f"a call begins with input {block['input']!r}")
            self.summary.calls.append({"id": block["id"], "name": block["name"], "input": ""})
        elif self.kind == "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            expect(block == empty, f"the block begins as {block!r}")
            self.summary.thoughts.append({"thinking": "", "signature": ""})
        elif self.kind == "redacted_thinking":
            expect_keys(block, {"type", "data"}, "a redacted_thinking block")
            expect(bool(block["data"]), "a sealed thought without data")
        else:
            expect(block == {"type": "text", "text": ""}, f"the block begins as {block!r}")
        self.state = "delta" if self.kind == "redacted_thinking" else "block"

    def block_delta(self, value: dict[str, Any]) -> None:
        expect(self.state in ("block", "delta"), f"content_block_delta in state {self.state}")
        expect_keys(value, {"type", "index", "delta"}, "content_block_delta")
        expect(value["index"] == self.summary.blocks, f"index is {value['index']}")
        delta = value["delta"]
        if self.kind == "tool_use":
            expect_keys(delta, {"type", "partial_json"}, "delta")
            expect(delta["type"] == "input_json_delta", f"a {delta['type']} in a call")
            self.summary.calls[-1]["input"] += delta["partial_json"]
        elif self.kind == "thinking":
            name = delta["type"].removesuffix("_delta")
            expect(name in {"thinking", "signature"}, f"a {delta['type']} in a thinking block")
            expect_keys(delta, {"type", name}, "delta")
            thought = self.summary.thoughts[-1]
            expect(not thought["signature"], "a thought goes on after its signature")
            expect(bool(delta[name]), f"a {delta['type']} that says nothing")
            thought[name] += delta[name]
        else:
            expect_keys(delta, {"type", "text"}, "delta")
            expect(self.kind == "text", f"a delta in a block of {self.kind}")
            expect(delta["type"] == "text_delta", f"a {delta['type']} in a text block")
            expect(isinstance(delta["text"], str) and bool(delta["text"]), f"text: {delta!r}")
            self.summary.text += delta["text"]
        self.state = "delta"

    def block_stop(self, value: dict[str, Any]) -> None:
        expect(self.state == "delta", f"content_block_stop in state {self.state}")
        expect_keys(value, {"type", "index"}, "content_block_stop")
        expect(value["index"] == self.summary.blocks, f"index is {value['index']}")
        self.summary.blocks += 1
        self.state = "between"

    def message_delta(self, value: dict[str, Any]) -> None:
        expect(self.state == "between", f"message_delta in state {self.state}")
        expect_keys(value, {"type", "delta", "usage"}, "message_delta")
        delta = value["delta"]
        expect_keys(delta, {"stop_reason", "stop_sequence"}, "delta")
        reason, sequence = delta["stop_reason"], delta["stop_sequence"]
        expect(reason in STOP_REASONS, f"stop_reason is {reason!r}")
        expect(reason != "tool_use" or bool(self.summary.calls), "it stopped for no call")
        expect((reason == "stop_sequence") == (sequence is not None), f"stop is {delta!r}")
        usage = self.usage(value["usage"])
        # A resumed attempt may find another part of the prompt cached: the sum must stay.
        same = _input(usage) == _input(self.start_usage)
        expect(same or self.estimated, "the prompt changed its length")
        self.summary.stop_reason, self.summary.stop_sequence = reason, sequence
        self.state = "ending"

    def message_stop(self, value: dict[str, Any]) -> None:
        expect(self.state == "ending", f"message_stop in state {self.state}")
        expect_keys(value, {"type"}, "message_stop")
        self.summary.done = True

    def ping(self, value: dict[str, Any]) -> None:
        expect(self.state != "new", "a ping before message_start")
        expect_keys(value, {"type"}, "ping")
        self.summary.pings += 1

    def error(self, value: dict[str, Any]) -> None:
        expect_keys(value, {"type", "error", "request_id"}, "an error event")
        error = value["error"]
        expect_keys(error, {"type", "message"}, "error")
        expect(error["type"].endswith("_error"), f"error.type is {error['type']!r}")
        expect(bool(error["message"]), "error.message is empty")
        self.summary.error = error

    def usage(self, usage: Any) -> dict[str, int]:
        counts = {name: usage[name] for name in usage if name not in {*USAGE_PARTS, *USAGE_WORDS}}
        expect(usage.get("service_tier") in {None, *TIERS}, f"service_tier: {usage}")
        if "headworks" in usage:
            expect_keys(usage["headworks"], {"cost_micro", "currency"}, "headworks")
            expect_count(usage["headworks"]["cost_micro"], "cost_micro")
        expect_keys(counts, USAGE_KEYS, "usage")
        for name, count in counts.items():
            expect_count(count, name)
        for name in set(usage) & set(USAGE_PARTS):
            keys, whole = USAGE_PARTS[name]
            expect_keys(usage[name], keys, name)
            total = sum(usage[name].values())
            exact = name == "cache_creation"
            expect(total == counts[whole] if exact else total <= counts[whole], f"{name}: {usage}")
        self.summary.usage = usage
        return counts


def _input(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if name != "output_tokens")
