"""A tenant's first request, through both official SDKs and the command line."""

import httpx
import openai
import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTION = "What is the capital of France?"
ASK = [{"role": "user", "content": QUESTION}]
# The SDK no longer has the parameter; the API does.
GREEDY = {"temperature": 0}


def test_openai_answers_paris(openai_client):
    answer = openai_client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_streams_paris(openai_client):
    chunks = list(
        openai_client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].usage.completion_tokens > 0
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_anthropic_answers_paris(anthropic_client):
    answer = anthropic_client.messages.create(
        model=MODEL, messages=ASK, max_tokens=64, extra_body=GREEDY
    )
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


def test_anthropic_streams_paris(anthropic_client):
    with anthropic_client.messages.stream(
        model=MODEL, messages=ASK, max_tokens=64, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text
    assert final.content[0].text == text
    assert final.stop_reason == "end_turn"


def test_completions_go_on_from_a_prompt(openai_client):
    prompt = "The capital of France is"
    answer = openai_client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0
    )
    streamed = openai_client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert "Paris" in answer.choices[0].text
    assert text == answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_counted_tokens_are_the_billed_ones(anthropic_client):
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=ASK)
    answer = anthropic_client.messages.create(model=MODEL, messages=ASK, max_tokens=1)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


def test_models_are_listed_in_both_dialects(openai_client, anthropic_client):
    assert MODEL in [model.id for model in openai_client.models.list()]
    assert MODEL in [model.id for model in anthropic_client.models.list()]
    assert openai_client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-17")


def test_the_same_seed_gives_the_same_answer(openai_client):
    def ask(seed):
        return openai_client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=1.0, seed=seed, max_tokens=24
        )

    first, again, other = (ask(seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_several_choices_come_back(openai_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, n=3, temperature=1.0, seed=1, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stop_string_ends_the_answer_and_is_not_in_it(openai_client, anthropic_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, stop=["Paris"]
    )
    assert "Paris" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    message = anthropic_client.messages.create(
        model=MODEL, messages=ASK, max_tokens=64, stop_sequences=["Paris"], extra_body=GREEDY
    )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "Paris"


def test_logprobs_are_of_the_tokens_that_came(openai_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.top_logprobs[0].logprob >= entry.logprob - 1e-6 for entry in content)


def test_every_answer_names_its_request(stack):
    for path, headers in (
        ("/v1/models", {"authorization": f"Bearer {stack.key}"}),
        ("/v1/models", {"x-api-key": stack.key, "anthropic-version": "2023-06-01"}),
        ("/v1/models", {}),
    ):
        response = httpx.get(stack.gateway_url + path, headers=headers)
        assert response.headers["x-request-id"] == response.headers["request-id"]
        assert response.headers["request-id"].startswith("req_")


def test_the_command_line_chats(stack):
    done = stack.command("chat", QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "TTFT" in done.stderr
    assert "$0.0000" in done.stderr


def test_every_request_has_one_settled_usage_row(stack, openai_client):
    answer = openai_client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, temperature=0
    )
    stack.settles()
    (row,) = stack.usage(request_id=answer.headers["x-request-id"])
    usage = answer.parse().usage
    assert row["cause"] == "complete"
    assert row["metered_prompt_tokens"] == usage.prompt_tokens
    assert row["metered_output_tokens"] == usage.completion_tokens
    assert row["delivered_tokens"] == usage.completion_tokens
    cached = row["metered_cached_tokens"]
    exact = (usage.prompt_tokens - cached) * 100_000 + cached * 50_000
    exact += usage.completion_tokens * 400_000
    assert row["billed_micro"] == (exact + 500_000) // 1_000_000
    assert row["first_token_ms"] > 0
