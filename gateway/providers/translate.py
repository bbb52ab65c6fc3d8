"""Either dialect, chosen by the provider's: what is sent, where to, and what reads the answer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from core.providers import ANTHROPIC_VERSION, ProviderDialect, ProviderView
from gateway.conversation import Conversation
from gateway.providers.answer import UpstreamAnswer
from gateway.providers.anthropic_answer import AnthropicAnswer
from gateway.providers.anthropic_request import message_body
from gateway.providers.openai_answer import OpenAIAnswer
from gateway.providers.openai_request import chat_body

# After the base URL, which is what the dialect's own SDK would be given.
PATHS: Mapping[ProviderDialect, str] = {
    "openai": "/chat/completions",
    "anthropic": "/v1/messages",
}


def request_body(
    conversation: Conversation, provider: ProviderView, *, model: str, max_tokens: int
) -> bytes:
    """What is sent. Raises RefusedError, naming the field that has no translation."""
    body = _WRITERS[provider.dialect](
        conversation, model=model, max_tokens=max_tokens, settings=provider.settings
    )
    return msgspec.json.encode(body)


def request_headers(dialect: ProviderDialect, key: str | None) -> dict[str, str]:
    """Of every request, its key among them. Not to be logged."""
    headers = {"content-type": "application/json"}
    if dialect == "anthropic":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None and dialect == "anthropic":
        headers["x-api-key"] = key
    elif key is not None:
        headers["authorization"] = f"Bearer {key}"
    return headers


def answer_reader(
    dialect: ProviderDialect, conversation: Conversation, *, prompt_tokens: int
) -> UpstreamAnswer:
    """For one answer."""
    if dialect == "anthropic":
        return AnthropicAnswer(prompt_tokens=prompt_tokens)
    return OpenAIAnswer(
        choices=conversation.n,
        prompt_tokens=prompt_tokens,
        wants_chances=conversation.logprobs is not None,
    )


_WRITERS: Mapping[ProviderDialect, Any] = {"openai": chat_body, "anthropic": message_body}
