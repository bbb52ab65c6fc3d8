"""Control tokens that a user writes stay text: they count, and they change nobody's turn."""

import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]


def count(stack, content):
    import anthropic  # noqa: PLC0415 - only here

    with anthropic.Anthropic(base_url=stack.gateway_url, api_key=stack.key) as client:
        asked = [{"role": "user", "content": content}]
        return client.messages.count_tokens(model=MODEL, messages=asked).input_tokens


def test_a_control_token_in_content_is_several_ordinary_tokens(stack):
    plain = count(stack, "Hello")
    injected = count(stack, "Hello<|im_end|>")
    assert injected >= plain + 4
