"""What a conversation may ask of a provider: refusals by name, before anything is sent.

A field is named as the caller wrote it, in the dialect of the caller; which fields a provider
has no place for is said by the translation into its dialect.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from core.errors import Code, RefusedError, refuse
from core.providers import ProviderSettings
from gateway.conversation import Conversation
from gateway.fields import bad
from gateway.toolbox import checked_object
from gateway.tools.structured import TOOLS

# Where the two dialects call one thing by two names: OpenAI's is the field's own here.
_ANTHROPIC_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}

# What of a conversation is how, and its value that asks for nothing.
_NEUTRAL: Mapping[str, tuple[str, object]] = {
    "temperature": ("temperature", None),
    "top_p": ("top_p", None),
    "logprobs": ("logprobs", None),
    "seed": ("seed", None),
    "n": ("n", 1),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "logit_bias": ("logit_bias", ()),
    "ignore_eos": ("ignore_eos", False),
    "min_tokens": ("min_tokens", 0),
    "allowed_token_ids": ("allowed_ids", ()),
    "bad_words": ("bad_words", ()),
    "stop_token_ids": ("stop_ids", ()),
    "prompt_logprobs": ("prompt_logprobs", None),
}
# What vLLM adds to OpenAI's request, in its own words. Nobody else takes them.
EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens",
    "allowed_token_ids", "bad_words", "stop_token_ids",
)  # fmt: skip


def asks(conversation: Conversation, field: str) -> object | None:
    """The field's value; None when it asks for nothing."""
    name, neutral = _NEUTRAL[field]
    value: object = getattr(conversation, name)
    return None if value is None or value == neutral else value


def refuse_asked(conversation: Conversation, fields: Iterable[str]) -> None:
    """Raises RefusedError for the first of these that asks for anything."""
    for field in fields:
        if asks(conversation, field) is not None:
            raise unsupported(conversation, field)


def unsupported(conversation: Conversation, field: str, why: str = "") -> RefusedError:
    """This model has no such thing."""
    param = named(conversation, field)
    message = f"{param}: {why or 'this model does not support it'}"
    return refuse(Code.UNSUPPORTED, message, param=param)


def named(conversation: Conversation, field: str) -> str:
    """A field in the words of the caller's dialect."""
    names = _ANTHROPIC_NAMES if conversation.dialect == "anthropic" else {}
    return names.get(field, field)


def message_at(conversation: Conversation, index: int) -> str:
    """The path of a turn, where it can be told from the turns."""
    return f"messages[{index}]" if conversation.dialect == "openai" else "messages"


def refuse_images(conversation: Conversation, settings: ProviderSettings) -> None:
    """Raises RefusedError for the first that this provider is not to be sent."""
    for image in conversation.images:
        if settings.images == "none":
            raise unsupported(conversation, image.param, "this model takes no images")
        if settings.images == "data" and image.url:
            why = "this model takes images as data, not as addresses"
            raise unsupported(conversation, image.param, why)


def is_forced(conversation: Conversation) -> bool:
    """Whether the grammar is that of a forced call, which the tool choice says already."""
    return conversation.grammar is not None and conversation.grammar_param == TOOLS


def schema_of(conversation: Conversation) -> Any:
    """The JSON schema that was asked for. Raises RefusedError: some callers send it as a text."""
    assert conversation.grammar is not None
    path = conversation.grammar_param
    try:
        schema = msgspec.json.decode(conversation.grammar.text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad(path, f"is not JSON: {error}") from error
    return checked_object(path, schema)


def only_chats(conversation: Conversation) -> None:
    """Raises RefusedError for a legacy completion: no provider is asked for one."""
    if conversation.kind == "text":
        message = "prompt: this model answers chat requests only"
        raise refuse(Code.UNSUPPORTED, message, param="prompt")
