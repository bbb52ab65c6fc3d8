"""The Responses API through the official SDK, on the real model: asked, streamed, gone on."""

import openai
import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

GREEDY = {"temperature": 0, "max_output_tokens": 32}


def test_a_conversation_goes_on_from_its_name(openai_client):
    first = openai_client.responses.create(
        model=MODEL, input="What is the capital of France?", **GREEDY
    )
    assert "Paris" in first.output_text
    with openai_client.responses.stream(
        model=MODEL, input="Say that again.", previous_response_id=first.id, **GREEDY
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        second = stream.get_final_response()
    assert text == second.output_text
    assert second.usage.input_tokens > first.usage.total_tokens
    assert openai_client.responses.retrieve(second.id).output_text == text
    openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(first.id)


def test_a_format_is_held_to(openai_client):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    answer = openai_client.responses.create(
        model=MODEL,
        input="The capital of France, as JSON.",
        text={"format": {"type": "json_schema", "name": "c", "schema": schema, "strict": True}},
        temperature=0,
        max_output_tokens=64,
    )
    assert answer.status == "completed"
    assert answer.output_text.startswith("{")
    assert '"capital"' in answer.output_text
