"""OpenAI's penalties and bias, and the extensions under vLLM's names, in both interfaces."""

import json
from collections.abc import Callable

import pytest

from core.errors import Code, RefusedError
from gateway.conversation import Conversation
from gateway.openai import parse_chat, parse_completion


def chat(**changes: object) -> Conversation:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | changes
    return parse_chat(json.dumps(body).encode())


def completion(**changes: object) -> Conversation:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi"} | changes).encode())


BOTH = pytest.mark.parametrize("parse", [chat, completion])
Parse = Callable[..., Conversation]


@BOTH
@pytest.mark.parametrize(
    ("sent", "field", "expected"),
    [
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"presence_penalty": 2}, "presence_penalty", 2.0),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"min_p": 0.05}, "min_p", 0.05),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"logit_bias": {"5": -100, "50256": 1.5}}, "logit_bias", ((5, -100.0), (50256, 1.5))),
        ({"stop_token_ids": [0, 7]}, "stop_ids", (0, 7)),
        ({"allowed_token_ids": [7, 3, 7]}, "allowed_ids", (7, 3)),
        ({"bad_words": ["no", " never"]}, "bad_words", ("no", " never")),
        ({"top_k": 5}, "top_k", 5),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
    ],
)
def test_a_parameter_reaches_the_conversation(
    parse: Parse, sent: dict[str, object], field: str, expected: object
) -> None:
    assert getattr(parse(**sent), field) == expected


@BOTH
@pytest.mark.parametrize(
    "sent",
    [
        {"frequency_penalty": 0},
        {"presence_penalty": None},
        {"repetition_penalty": 1},
        {"repetition_penalty": None},
        {"min_p": 0},
        {"min_tokens": 0},
        {"logit_bias": {}},
        {"logit_bias": None},
        {"stop_token_ids": []},
        {"allowed_token_ids": None},
        {"bad_words": []},
        {"prompt_logprobs": None},
    ],
)
def test_a_value_that_changes_nothing_is_as_good_as_absent(
    parse: Parse, sent: dict[str, object]
) -> None:
    assert parse(**sent) == parse()


BAD = [
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 65}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@BOTH
@pytest.mark.parametrize(("sent", "param"), BAD)
def test_a_value_that_cannot_be_used_is_refused_and_names_its_field(
    parse: Parse, sent: dict[str, object], param: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**sent)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.param) == (Code.BAD_REQUEST, param)
