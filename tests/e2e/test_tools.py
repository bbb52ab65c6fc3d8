"""A forced call from the real small model, in both dialects, whole and streamed."""

import json

import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
ASK = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
THEIR_TOOLS = [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]


def assert_asks_for_the_weather(arguments):
    assert set(arguments) == {"city", "unit"}
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize(
    "forced", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_the_openai_sdk_gets_the_calls_it_forced(stack, forced):
    import openai  # noqa: PLC0415 - only here

    asked = {
        "model": MODEL,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": forced,
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "seed": 7,
        "n": 2,
    }
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.key) as client:
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
    told = [
        [choice.message.tool_calls[0].function.arguments for choice in answer.choices]
        for answer in (whole, streamed)
    ]
    assert told[0] == told[1]
    for arguments in told[0]:
        assert_asks_for_the_weather(json.loads(arguments))
    for choice in (*whole.choices, *streamed.choices):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls[0].function.name == "weather"
        assert not choice.message.content


def test_the_anthropic_sdk_gets_the_calls_it_forced(stack):
    import anthropic  # noqa: PLC0415 - only here

    asked = {
        "model": MODEL,
        "messages": ASK,
        "tools": THEIR_TOOLS,
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 60,
        "extra_body": {"temperature": 0},  # the SDK no longer has it; the API does
    }
    with anthropic.Anthropic(base_url=stack.gateway_url, api_key=stack.key) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        (call,) = message.content
        assert (call.type, call.name) == ("tool_use", "weather")
        assert_asks_for_the_weather(call.input)
        assert message.stop_reason == "tool_use"
    assert whole.content[0].input == streamed.content[0].input


def test_calls_and_their_results_go_on(stack):
    """Left to itself the model may do anything: what it says is an answer of some kind."""
    import openai  # noqa: PLC0415 - only here

    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees and sunny"},
    ]
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.key) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=40, temperature=0
        )
    (choice,) = answer.choices
    assert choice.message.content or choice.message.tool_calls


def test_calls_of_a_strict_tool_fit_whenever_the_model_makes_one(stack):
    import openai  # noqa: PLC0415 - only here

    strict = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.key) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=strict, max_tokens=60, seed=3, n=4
        )
    for choice in answer.choices:
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls:
                assert_asks_for_the_weather(json.loads(call.function.arguments))
        else:
            assert choice.message.content


def test_a_marked_prompt_is_written_once_and_read_again(stack):
    import anthropic  # noqa: PLC0415 - only here

    text = f"You answer in one word. {stack.data.name} " + "Be brief, be kind, be right. " * 20
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    asked = {"model": MODEL, "max_tokens": 4, "messages": ASK, "tools": THEIR_TOOLS}
    with anthropic.Anthropic(base_url=stack.gateway_urls[0], api_key=stack.key) as client:
        first = client.messages.create(system=system, **asked).usage
        seen = [client.messages.create(system=system, **asked).usage for _ in range(4)]
    assert first.cache_creation_input_tokens > 100
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    # Two workers: it may be written on either, and is read where it was.
    assert max(usage.cache_read_input_tokens for usage in seen) > 100
