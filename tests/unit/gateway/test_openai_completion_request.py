"""Completion requests: what is understood, and what is refused by name."""

import json

import pytest

from core.errors import Code, RefusedError
from gateway.conversation import Conversation
from gateway.openai import parse_completion
from gateway.openai.completion_request import PROMPT_IDS_MAX


def parse(**changes: object) -> Conversation:
    body: dict[str, object] = {"model": "m", "prompt": "Once"} | changes
    return parse_completion(json.dumps(body).encode())


def test_the_smallest_request_gets_the_interface_s_defaults() -> None:
    assert parse() == Conversation(
        dialect="openai", kind="text", model="m", prompt="Once", max_tokens=16
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ([1, 0, 2], (1, 0, 2)),
        ([[5, 6]], (5, 6)),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompt: object, expected: object) -> None:
    assert parse(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"echo": False},
        {"suffix": None},
        {"suffix": ""},
        {"best_of": 1},
        {"best_of": None},
        {"logit_bias": {}},
        {"logprobs": None},
        {"max_tokens": 16},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(changes: dict[str, object]) -> None:
    assert parse(**changes) == parse()


def test_parameters_reach_the_conversation() -> None:
    conversation = parse(max_tokens=3, logprobs=5, n=2, best_of=2, stop="\n", seed=-1, stream=True)
    assert conversation.max_tokens == 3
    assert conversation.logprobs == 5
    assert conversation.n == 2
    assert conversation.stop == ("\n",)
    assert conversation.seed == 2**63 - 1
    assert conversation.stream


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"prompt": None}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": ""}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": []}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": {}}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": 5}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": [""]}, Code.BAD_REQUEST, "prompt[0]"),
        ({"prompt": [[]]}, Code.BAD_REQUEST, "prompt[0]"),
        ({"prompt": [None]}, Code.BAD_REQUEST, "prompt[0]"),
        ({"prompt": [1.5]}, Code.BAD_REQUEST, "prompt[0]"),
        ({"prompt": [1, -1]}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": [1, 2**31]}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": [True]}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": [1, "a"]}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": [["a"]]}, Code.BAD_REQUEST, "prompt[0]"),
        ({"prompt": [0] * (PROMPT_IDS_MAX + 1)}, Code.BAD_REQUEST, "prompt"),
        ({"prompt": ["a", "b"]}, Code.UNSUPPORTED, "prompt"),
        ({"prompt": [[1], [2]]}, Code.UNSUPPORTED, "prompt"),
        ({"echo": 1}, Code.BAD_REQUEST, "echo"),
        ({"suffix": "end"}, Code.UNSUPPORTED, "suffix"),
        ({"best_of": 2}, Code.UNSUPPORTED, "best_of"),
        ({"best_of": 0}, Code.BAD_REQUEST, "best_of"),
        ({"logprobs": 6}, Code.BAD_REQUEST, "logprobs"),
        ({"logprobs": True}, Code.BAD_REQUEST, "logprobs"),
        ({"max_tokens": 0}, Code.BAD_REQUEST, "max_tokens"),
        ({"max_completion_tokens": 5}, Code.BAD_REQUEST, "max_completion_tokens"),
        ({"messages": []}, Code.BAD_REQUEST, "messages"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, object], code: Code, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**changes)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.status, refusal.param) == (code, 400, param)
    assert refusal.message.startswith((f"{param}:", "Unrecognized request argument"))
