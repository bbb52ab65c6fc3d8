"""Structured output through the official SDKs, as their users write it: a class, parsed."""

import json
from enum import Enum

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

ASK = [{"role": "user", "content": "Who wrote Hamlet? Name the author, and two of the plays."}]


class Kind(Enum):
    COMEDY = "comedy"
    TRAGEDY = "tragedy"


class Play(pydantic.BaseModel):
    title: str = pydantic.Field(max_length=16)
    kind: Kind


class Author(pydantic.BaseModel):
    """Somebody who wrote plays."""

    name: str = pydantic.Field(max_length=16)
    born: int | None = pydantic.Field(ge=1000, le=2000)
    plays: list[Play] = pydantic.Field(min_length=1, max_length=2)


def test_openai_parses_an_answer_into_a_class(openai_client):
    answer = openai_client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Author, max_tokens=200, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Author)
    assert parsed.plays


def test_openai_streams_an_answer_into_a_class(openai_client):
    with openai_client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Author, max_tokens=200, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Author)


def test_anthropic_parses_an_answer_into_a_class(anthropic_client):
    schema = Author.model_json_schema()
    answer = anthropic_client.messages.create(
        model=MODEL,
        messages=ASK,
        max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert answer.stop_reason == "end_turn"
    jsonschema.validate(json.loads(answer.content[0].text), schema)
    Author.model_validate_json(answer.content[0].text)


def test_vllms_fields_hold_an_answer_to_a_choice_and_a_regex(openai_client):
    def said(**fields):
        answer = openai_client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=40, extra_body=fields
        )
        return answer.choices[0].message.content

    assert said(structured_outputs={"choice": ["tragedy", "comedy"]}) in ("tragedy", "comedy")
    assert said(guided_regex="[A-Z][a-z]{2,8} \\d{4}")[-4:].isdigit()


def test_a_schema_that_cannot_be_held_to_is_told_to_the_sdks(stack, openai_client):
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
    assert raised.value.param == "response_format.json_schema.schema"
    assert "uniqueItems" in raised.value.message
    response = httpx.post(
        f"{stack.gateway_url}/v1/messages",
        headers={"x-api-key": stack.key},
        json={
            "model": MODEL,
            "messages": ASK,
            "max_tokens": 9,
            "output_format": {"type": "json_schema", "schema": {"$ref": "#"}},
        },
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("output_format.schema: ")
