"""Sampling through the official SDK, against the real small model on two real workers."""

from collections import Counter

import openai
import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

PROMPT = "The capital of France is"
EOS = 2  # <|im_end|>, as the model's generation config has it
GREEDY = {"model": MODEL, "prompt": PROMPT, "temperature": 0}


@pytest.fixture
def client(stack):
    with openai.OpenAI(
        base_url=f"{stack.gateway_url}/v1", api_key=stack.key, max_retries=0
    ) as client:
        yield client


def test_an_echoed_prompt_has_its_logprobs_and_they_are_likely_where_the_text_is(client):
    answer = client.completions.create(**GREEDY, max_tokens=4, echo=True, logprobs=3)
    [choice] = answer.choices
    told = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None
    count = answer.usage.prompt_tokens
    assert len(told.tokens) == count + 4
    # Greedy tokens are the likeliest of their places; the prompt's own are likely, or less so.
    for logprob, top in list(zip(told.token_logprobs, told.top_logprobs, strict=True))[count:]:
        assert logprob == max(top.values())
    assert told.token_logprobs[count - 1] > -3  # "is", after "The capital of France"


def test_the_same_prompt_told_twice_tells_the_same_though_it_is_cached_by_then(client):
    first, second = (
        client.completions.create(**GREEDY, max_tokens=1, extra_body={"prompt_logprobs": 1})
        .choices[0]
        .model_extra["prompt_logprobs"]
        for _ in "ab"
    )
    for one, other in zip(first[1:], second[1:], strict=True):
        assert list(one) == list(other)
        for id_, told in one.items():
            assert told["logprob"] == pytest.approx(other[id_]["logprob"], abs=0.05)


def test_an_end_that_is_wanted_comes_right_after_min_tokens(client):
    for least in (0, 4):
        answer = client.completions.create(
            **GREEDY,
            max_tokens=20,
            logit_bias={str(EOS): 100},
            extra_body={"min_tokens": least},
        )
        assert answer.usage.completion_tokens == least + 1
        assert answer.choices[0].finish_reason == "stop"


def test_a_bad_word_is_never_said(client):
    said = client.completions.create(**GREEDY, max_tokens=12).choices[0].text
    assert "Paris" in said
    answer = client.completions.create(**GREEDY, max_tokens=12, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in answer.choices[0].text


def test_a_penalised_answer_repeats_itself_less(client):
    def most_said(**asked):
        answer = client.completions.create(**GREEDY, max_tokens=60, logprobs=0, **asked)
        return Counter(answer.choices[0].logprobs.tokens).most_common(1)[0][1]

    assert most_said(frequency_penalty=2) < most_said()


def test_only_allowed_tokens_are_said_and_a_contradiction_is_a_400_with_its_reason(client):
    allowed = client.completions.create(
        **GREEDY,
        max_tokens=5,
        extra_body={"allowed_token_ids": [260, 28], "ignore_eos": True, "prompt_logprobs": 0},
    )
    assert allowed.usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="leave no token to choose from"):
        client.completions.create(
            **GREEDY, max_tokens=5, extra_body={"allowed_token_ids": [EOS], "min_tokens": 3}
        )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**GREEDY, extra_body={"stop_token_ids": [10**6]})
    assert caught.value.param == "stop_token_ids"


def test_a_seed_draws_the_same_again_and_choices_differ(client):
    asked = {**GREEDY, "temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 12}
    first, again = (client.completions.create(**asked) for _ in "ab")
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts
    assert len(set(texts)) == 3
