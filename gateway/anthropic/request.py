"""`POST /v1/messages` and its `count_tokens`: a body into a `Conversation`.

Text, images, tools, thinking and structured output: documents are refused by name.
`cache_control` says up to where and how long a prompt is worth keeping; every prefix is cached
for its own tenant anyhow. Consecutive turns of one role are joined, as the API's reference
says. The last turn is the user's: continuing an assistant's turn (prefill) is refused.
"""

from typing import Literal

import msgspec

from core.errors import Code, refuse
from core.protocol import ServiceClass
from gateway.anthropic.blocks import CacheBreaks, read_blocks, refuse_unknown, said
from gateway.anthropic.structure import read_output
from gateway.anthropic.thinking import read_thinking
from gateway.anthropic.tools import read_toolbox
from gateway.anthropic.turns import Turns
from gateway.conversation import Conversation, Dialect
from gateway.fields import (
    MESSAGES_MAX,
    MODEL_CHARS_MAX,
    SHORT_TEXT_CHARS_MAX,
    STOP_CHARS_MAX,
    Fields,
    bad,
    missing,
    read_object,
    read_timeout,
)
from gateway.tools.structured import structure_of

DIALECT: Dialect = "anthropic"
INDEX = ".{}"  # messages.0.content
STOPS_MAX = 16
TIERS = ("auto", "standard_only")
SERVICE_CLASS: ServiceClass = "standard"  # of both tiers: there is no priority capacity to buy

_ASSISTANT = ("tool_use", "thinking", "redacted_thinking")

# Parameters we do not support, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}


def parse_messages(body: bytes) -> Conversation:
    """The request, or RefusedError naming the field at fault."""
    fields = read_object(body, index=INDEX)
    prompt = _prompt(fields)
    max_tokens = fields.integer("max_tokens", 1)
    if max_tokens is None:
        raise missing("max_tokens")
    fields.choice("service_tier", *TIERS)
    asked, effort = read_output(fields)
    structure = structure_of(asked, prompt.toolbox)
    conversation = msgspec.structs.replace(
        prompt,
        grammar=structure.grammar if structure else None,
        grammar_param=structure.param if structure else "",
        thinking=read_thinking(fields, effort, max_tokens=max_tokens),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 1),
        top_p=_top_p(fields),
        top_k=fields.integer("top_k", 0),
        stop=_stop(fields),
        stream=fields.boolean("stream") or False,
        service_class=SERVICE_CLASS,
        user=_user(fields),
        deadline_s=read_timeout(fields),
    )
    refuse_unknown(fields)
    return conversation


def parse_count_tokens(body: bytes) -> Conversation:
    """What `parse_messages` reads of the prompt; parameters of generation are unknown here."""
    fields = read_object(body, index=INDEX)
    prompt = _prompt(fields)
    _, effort = read_output(fields)  # a format is no part of the prompt
    thinking = read_thinking(fields, effort, max_tokens=None)
    refuse_unknown(fields)
    return msgspec.structs.replace(prompt, thinking=thinking)


def _prompt(fields: Fields) -> Conversation:
    model = fields.required_text("model", chars_max=MODEL_CHARS_MAX)
    for name, accepted in _NEUTRAL.items():
        fields.neutral(name, accepted)
    breaks = CacheBreaks()
    toolbox = read_toolbox(fields, breaks)
    turns = Turns(breaks)
    if not fields.says_nothing("system", ("", [])):
        turns.add("system", read_blocks(fields, "system", breaks))
    _read_messages(fields, turns, breaks)
    # On the request itself it stands for one on the last block.
    ttl = breaks.read(fields)
    if ttl is not None:
        breaks.add(fields, turns.end(ttl))
    return Conversation(
        dialect=DIALECT,
        kind="chat",
        model=model,
        turns=turns.taken,
        toolbox=toolbox,
        cache_breaks=tuple(breaks.found),
    )


def _read_messages(fields: Fields, turns: Turns, breaks: CacheBreaks) -> None:
    role: str | None = None
    for message in fields.objects("messages", count_max=MESSAGES_MAX):
        first, role = role is None, _role(message)
        if first and role != "user":
            raise bad(message.at("role"), "the first message must have the role 'user'")
        kinds = ("image", "tool_result") if role == "user" else _ASSISTANT
        if role == "assistant":
            turns.settled(message.at("role"))
        turns.add(role, read_blocks(message, "content", breaks, *kinds))
        refuse_unknown(message)
    if role == "assistant":
        raise refuse(
            Code.UNSUPPORTED,
            "messages: continuing an assistant message (prefill) is not supported here; "
            "the last message must have the role 'user'",
            param="messages",
        )
    turns.settled("messages")


def _role(message: Fields) -> Literal["user", "assistant"]:
    match message.required_text("role"):
        case "user":
            return "user"
        case "assistant":
            return "assistant"
        case "system":
            raise bad(
                message.at("role"),
                "must be 'user' or 'assistant'; the top-level 'system' holds a system prompt",
            )
        case _:
            raise bad(message.at("role"), "must be 'user' or 'assistant'")


def _top_p(fields: Fields) -> float | None:
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise bad("top_p", "must be above 0")
    return top_p


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.strings("stop_sequences", count_max=STOPS_MAX, chars_max=STOP_CHARS_MAX)
    for i, each in enumerate(stop):
        said(f"stop_sequences.{i}", each)
    return stop


def _user(fields: Fields) -> str | None:
    metadata = fields.nested("metadata")
    if metadata is None:
        return None
    user = metadata.text("user_id", chars_max=SHORT_TEXT_CHARS_MAX)
    refuse_unknown(metadata)
    return user
