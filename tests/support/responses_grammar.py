"""A strict state machine of the Responses API's event stream, over recorded bytes.

    created in_progress item* (completed | incomplete)
    item: output_item.added, content_part.added text.delta+ text.done content_part.done,
              output_item.done
          output_item.added arguments.delta* arguments.done output_item.done
          output_item.added, [summary_part.added summary_text.delta+ summary_text.done
              summary_part.done], output_item.done
    or at any point   [created] error failed      and then nothing

Written from the interface's description, not from our writer. A check returns what a client
would have gathered, or raises GrammarError with the reason.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.support.sse_frames import Frame, expect, expect_count, expect_keys, parse, split

LAST = {"response.completed", "response.incomplete", "response.failed"}
USAGE_KEYS = {
    "input_tokens",
    "input_tokens_details",
    "output_tokens",
    "output_tokens_details",
    "total_tokens",
}


@dataclass
class Summary:
    """What the stream said. `response` is the last event's."""

    id: str = ""
    status: str = ""
    response: dict[str, Any] = field(default_factory=dict)
    output: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    comments: int = 0
    deltas: list[str] = field(default_factory=list)


def check_responses_stream(raw: bytes, *, cut: bool = False) -> Summary:
    """`cut`: the client left, so that any prefix of a legal stream will do."""
    machine = _Machine()
    for frame in split(raw, cut=cut):
        machine.step(frame)
    expect(cut or bool(machine.summary.status), "the stream ends without its last event")
    return machine.summary


class _Machine:
    def __init__(self) -> None:
        self.summary = Summary()
        self.number = 0
        self.began = 0  # of `created` and `in_progress`
        self.item: dict[str, Any] | None = None  # that is open
        self.part: str | None = None  # the text of the part that is open
        self.text = ""
        self.over: set[str] = set()  # of the item: its part, its arguments

    def step(self, frame: Frame) -> None:
        summary = self.summary
        expect(not summary.status, f"a frame after the last event: {frame}")
        if frame.comment is not None:
            summary.comments += 1
            return
        value = parse(frame.data)
        expect(frame.event == value.get("type"), f"{frame.event!r} holds a {value.get('type')!r}")
        expect(value["sequence_number"] == self.number, f"number {value['sequence_number']}")
        self.number += 1
        kind = value["type"]
        expect(summary.error is None or kind == "response.failed", f"{kind} after an error")
        handler: Any = getattr(self, "on_" + kind.replace(".", "_"), None)
        expect(handler is not None, f"an unknown event: {kind}")
        handler(value)

    def on_response_created(self, value: dict[str, Any]) -> None:
        expect(self.began == 0, "created twice")
        self.began = 1
        self.summary.id = value["response"]["id"]
        expect(self.summary.id.startswith("resp_"), f"id is {self.summary.id!r}")
        self.head(value, "in_progress")
        expect(value["response"]["output"] == [], "output before there is any")

    def on_response_in_progress(self, value: dict[str, Any]) -> None:
        expect(self.began == 1, "in_progress out of order")
        self.began = 2
        self.head(value, "in_progress")

    def on_response_output_item_added(self, value: dict[str, Any]) -> None:
        expect_keys(value, {"type", "sequence_number", "output_index", "item"}, "added")
        expect(self.began == 2, "an item before the response began")
        expect(self.item is None, "an item inside another")
        expect(value["output_index"] == len(self.summary.output), "output_index is off")
        item = value["item"]
        expect(item["status"] == "in_progress", f"an item begins {item['status']}")
        others = {each["id"] for each in self.summary.output}
        expect(item["id"] not in others, "two items have one id")
        if item["type"] == "message":
            expect(item["content"] == [], "a message begins with content")
            expect(item["role"] == "assistant", f"role is {item['role']!r}")
        elif item["type"] == "reasoning":
            expect_keys(item, {"id", "type", "status", "summary"}, "a thought")
            expect(item["summary"] == [], "a thought begins with a summary")
        else:
            expect(item["type"] == "function_call", f"an item is {item['type']!r}")
            expect(item["arguments"] == "", "a call begins with arguments")
            calls = {each.get("call_id") for each in self.summary.output}
            expect(item["call_id"] not in calls, "two calls have one id")
        self.item, self.text, self.over = item, "", set()

    def on_response_content_part_added(self, value: dict[str, Any]) -> None:
        self.in_item(value, "message")
        expect(self.part is None, "a part inside another")
        expect(not self.over, "a second part")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        expect(value["part"] == part, f"a part begins with {value['part']}")
        self.part = ""

    def on_response_output_text_delta(self, value: dict[str, Any]) -> None:
        self.in_item(value, "message")
        expect(self.part is not None, "text outside a part")
        expect("text" not in self.over, "text after its end")
        expect(bool(value["delta"]) or bool(value["logprobs"]), "a delta that says nothing")
        self.text += value["delta"]
        self.summary.deltas.append(value["delta"])

    def on_response_output_text_done(self, value: dict[str, Any]) -> None:
        self.in_item(value, "message")
        expect(self.part is not None, "text ends outside a part")
        expect(value["text"] == self.text, "the text is not what its deltas said")
        self.over.add("text")

    def on_response_content_part_done(self, value: dict[str, Any]) -> None:
        self.in_item(value, "message")
        expect("text" in self.over, "a part ends before its text")
        expect(value["part"]["text"] == self.text, "the part is not what its deltas said")
        self.part = None
        self.over.add("part")

    def on_response_reasoning_summary_part_added(self, value: dict[str, Any]) -> None:
        self.in_summary(value)
        expect(self.part is None, "a part inside another")
        expect(not self.over, "a second part")
        expect(value["part"] == {"type": "summary_text", "text": ""}, "a part begins with text")
        self.part = ""

    def on_response_reasoning_summary_text_delta(self, value: dict[str, Any]) -> None:
        self.in_summary(value)
        expect(self.part is not None, "text outside a part")
        expect("text" not in self.over, "text after its end")
        expect(bool(value["delta"]), "a delta that says nothing")
        self.text += value["delta"]

    def on_response_reasoning_summary_text_done(self, value: dict[str, Any]) -> None:
        self.in_summary(value)
        expect(value["text"] == self.text, "the text is not what its deltas said")
        self.over.add("text")

    def on_response_reasoning_summary_part_done(self, value: dict[str, Any]) -> None:
        self.in_summary(value)
        expect("text" in self.over, "a part ends before its text")
        expect(value["part"]["text"] == self.text, "the part is not what its deltas said")
        self.part = None
        self.over.add("part")

    def on_response_function_call_arguments_delta(self, value: dict[str, Any]) -> None:
        self.in_item(value, "function_call")
        expect(not self.over, "arguments after their end")
        expect(bool(value["delta"]), "a delta that says nothing")
        self.text += value["delta"]

    def on_response_function_call_arguments_done(self, value: dict[str, Any]) -> None:
        self.in_item(value, "function_call")
        expect(value["arguments"] == self.text, "the arguments are not what their deltas said")
        self.over.add("arguments")

    def on_response_output_item_done(self, value: dict[str, Any]) -> None:
        item = value["item"]
        expect(self.item is not None and item["id"] == self.item["id"], "another item ends")
        expect(value["output_index"] == len(self.summary.output), "output_index is off")
        if item["type"] == "message":
            expect("part" in self.over, "a message ends before its part")
            expect([p["text"] for p in item["content"]] == [self.text], "a message's text is off")
        elif item["type"] == "reasoning":
            expect(self.part is None, "a thought ends inside its summary")
            told = "".join(part["text"] for part in item["summary"])
            expect(told == self.text, "a summary is not what its deltas said")
        else:
            expect("arguments" in self.over, "a call ends before its arguments")
            expect(item["arguments"] == self.text, "a call's arguments are off")
        expect(item["status"] in {"completed", "incomplete"}, f"ends {item['status']}")
        self.summary.output.append(item)
        self.item = None

    def on_response_completed(self, value: dict[str, Any]) -> None:
        self.whole(value, "completed")
        expect_count(value["response"]["completed_at"], "completed_at")
        expect(value["response"]["incomplete_details"] is None, "complete, with details")

    def on_response_incomplete(self, value: dict[str, Any]) -> None:
        self.whole(value, "incomplete")
        reason = value["response"]["incomplete_details"]["reason"]
        expect(reason in {"max_output_tokens", "content_filter"}, f"the reason is {reason!r}")

    def on_error(self, value: dict[str, Any]) -> None:
        keys = {"type", "sequence_number", "code", "message", "param"}
        expect_keys(value, keys, "error")
        expect(bool(value["message"]), "error.message is empty")
        expect(isinstance(value["code"], str), "error.code is no string")
        self.summary.error = value

    def on_response_failed(self, value: dict[str, Any]) -> None:
        expect(self.summary.error is not None, "failed without an error")
        error = value["response"]["error"]
        expect(error["code"] in {"server_error", "rate_limit_exceeded"}, f"{error['code']!r}")
        self.end(value, "failed")

    def whole(self, value: dict[str, Any], status: str) -> None:
        expect(self.item is None, "the response ends inside an item")
        response = value["response"]
        expect(response["output"] == self.summary.output, "its output is not what was told")
        usage = response["usage"]
        expect_keys(usage, USAGE_KEYS | ({"headworks"} & set(usage)), "usage")
        total = usage["input_tokens"] + usage["output_tokens"]
        expect(usage["total_tokens"] == total, f"total_tokens is off: {usage}")
        expect(response["error"] is None, "an error in what did not fail")
        self.end(value, status)

    def end(self, value: dict[str, Any], status: str) -> None:
        self.head(value, status)
        self.summary.response, self.summary.status = value["response"], status

    def head(self, value: dict[str, Any], status: str) -> None:
        expect_keys(value, {"type", "sequence_number", "response"}, value["type"])
        response = value["response"]
        expect(response["id"] == self.summary.id, "the id changed")
        expect(response["object"] == "response", f"object is {response['object']!r}")
        expect(response["status"] == status, f"status is {response['status']!r}, not {status!r}")

    def in_summary(self, value: dict[str, Any]) -> None:
        self.in_item(value, "reasoning")
        expect(value["summary_index"] == 0, "summary_index is off")

    def in_item(self, value: dict[str, Any], kind: str) -> None:
        expect(self.item is not None, f"{value['type']} outside an item")
        assert self.item is not None
        expect(self.item["type"] == kind, f"{value['type']} in a {self.item['type']}")
        expect(value["item_id"] == self.item["id"], "item_id is another's")
        expect(value["output_index"] == len(self.summary.output), "output_index is off")
        expect(value.get("content_index", 0) == 0, "content_index is off")
