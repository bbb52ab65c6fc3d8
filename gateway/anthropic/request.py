"""`POST /v1/messages` and its `count_tokens`: a body into a `Conversation`.

Text only, so far: tools, thinking, images and documents are refused by name, never ignored.
`cache_control` is accepted and has no effect: every prefix is cached for its own tenant.
Consecutive turns of one role are joined, as the API's reference says. The last turn is the
user's: continuing an assistant's turn (prefill) is refused.
"""

from core.errors import Code, refuse
from core.protocol import ServiceClass
from gateway.conversation import Conversation, Dialect, Role, Turn
from gateway.fields import (
    MESSAGES_MAX,
    MODEL_CHARS_MAX,
    PARTS_MAX,
    SHORT_TEXT_CHARS_MAX,
    STOP_CHARS_MAX,
    Fields,
    bad,
    missing,
    read_object,
)

DIALECT: Dialect = "anthropic"
INDEX = ".{}"  # messages.0.content
STOPS_MAX = 16
TIERS = ("auto", "standard_only")
SERVICE_CLASS: ServiceClass = "standard"  # of both tiers: there is no priority capacity to buy

# Parameters we do not support, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}


def parse_messages(body: bytes) -> Conversation:
    """The request, or RefusedError naming the field at fault."""
    fields = read_object(body, index=INDEX)
    model, turns = _model_and_turns(fields)
    max_tokens = fields.integer("max_tokens", 1)
    if max_tokens is None:
        raise missing("max_tokens")
    fields.choice("service_tier", *TIERS)
    conversation = Conversation(
        dialect=DIALECT,
        kind="chat",
        model=model,
        turns=turns,
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 1),
        top_p=_top_p(fields),
        top_k=fields.integer("top_k", 0),
        stop=_stop(fields),
        stream=fields.boolean("stream") or False,
        service_class=SERVICE_CLASS,
        user=_user(fields),
    )
    _refuse_unknown(fields)
    return conversation


def parse_count_tokens(body: bytes) -> Conversation:
    """What `parse_messages` reads of the prompt; parameters of generation are unknown here."""
    fields = read_object(body, index=INDEX)
    model, turns = _model_and_turns(fields)
    _refuse_unknown(fields)
    return Conversation(dialect=DIALECT, kind="chat", model=model, turns=turns)


def _model_and_turns(fields: Fields) -> tuple[str, tuple[Turn, ...]]:
    model = fields.required_text("model", chars_max=MODEL_CHARS_MAX)
    for name, accepted in _NEUTRAL.items():
        fields.neutral(name, accepted)
    fields.nested("cache_control")
    return model, (*_system(fields), *_turns(fields))


def _system(fields: Fields) -> tuple[Turn, ...]:
    if fields.says_nothing("system", ("", [])):
        return ()
    return (Turn(role="system", content=_text(fields, "system")),)


def _turns(fields: Fields) -> tuple[Turn, ...]:
    said: list[tuple[Role, list[str]]] = []
    for message in fields.objects("messages", count_max=MESSAGES_MAX):
        role = _role(message)
        if not said and role != "user":
            raise bad(message.at("role"), "the first message must have the role 'user'")
        content = _text(message, "content")
        _refuse_unknown(message)
        if said and said[-1][0] == role:
            said[-1][1].append(content)
        else:
            said.append((role, [content]))
    if said[-1][0] == "assistant":
        raise refuse(
            Code.UNSUPPORTED,
            "messages: continuing an assistant message (prefill) is not supported here; "
            "the last message must have the role 'user'",
            param="messages",
        )
    return tuple(Turn(role=role, content="\n".join(texts)) for role, texts in said)


def _role(message: Fields) -> Role:
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


def _text(fields: Fields, name: str) -> str:
    content = fields.text_or_objects(name, count_max=PARTS_MAX)
    if isinstance(content, str):
        return _said(fields.at(name), content)
    return "\n".join(map(_block_text, content))


def _block_text(block: Fields) -> str:
    kind = block.required_text("type")
    if kind != "text":
        path = block.at("type")
        raise refuse(Code.UNSUPPORTED, f"{path}: only text blocks are supported here", param=path)
    text = _said(block.at("text"), block.required_text("text"))
    block.nested("cache_control")
    block.neutral("citations", ([],))
    _refuse_unknown(block)
    return text


def _said(path: str, text: str) -> str:
    if not text.strip():
        raise bad(path, "must hold more than white space")
    return text


def _top_p(fields: Fields) -> float | None:
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise bad("top_p", "must be above 0")
    return top_p


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.strings("stop_sequences", count_max=STOPS_MAX, chars_max=STOP_CHARS_MAX)
    for i, each in enumerate(stop):
        _said(f"stop_sequences.{i}", each)
    return stop


def _user(fields: Fields) -> str | None:
    metadata = fields.nested("metadata")
    if metadata is None:
        return None
    user = metadata.text("user_id", chars_max=SHORT_TEXT_CHARS_MAX)
    _refuse_unknown(metadata)
    return user


def _refuse_unknown(fields: Fields) -> None:
    name = fields.first_left()
    if name is not None:
        raise bad(fields.at(name), "Extra inputs are not permitted")
