"""`POST /v1/chat/completions`: a body into a `Conversation`.

Text, images, tools and structured output: audio is refused by name, never ignored. Images are
the user's alone, as in the API.
A parameter we do not support is accepted at the value that changes nothing.
Parameters that never change the answer (`metadata`, `safety_identifier`, …) are accepted.
"""

from core.errors import Code, refuse
from gateway.conversation import Conversation, Role, Turn
from gateway.fields import (
    MESSAGES_MAX,
    PARTS_MAX,
    SHORT_TEXT_CHARS_MAX,
    Fields,
    bad,
    missing,
    read_object,
)
from gateway.images import DETAILS, Detail, Image, Written, image_at, written
from gateway.openai.generation import DIALECT, INDEX, read_generation, refuse_unknown
from gateway.openai.structure import read_structure
from gateway.openai.thinking import read_effort, read_thoughts
from gateway.openai.tools import read_calls, read_toolbox
from gateway.toolbox import Unanswered
from gateway.tools.structured import structure_of

TOP_LOGPROBS_MAX = 20

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# Parameters we do not support, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# The same within a message; an answer of ours, sent back as it came, passes.
_MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
}


def parse_chat(body: bytes) -> Conversation:
    """The request, or RefusedError naming the field at fault."""
    fields = read_object(body, index=INDEX)
    generation = read_generation(fields)
    for name, accepted in _NEUTRAL.items():
        fields.neutral(name, accepted)
    toolbox = read_toolbox(fields)
    structure = structure_of(read_structure(fields), toolbox)
    conversation = Conversation(
        dialect=DIALECT,
        kind="chat",
        turns=_turns(fields),
        toolbox=toolbox,
        thinking=read_effort(fields, "reasoning_effort"),
        grammar=structure.grammar if structure else None,
        grammar_param=structure.param if structure else "",
        max_tokens=_max_tokens(fields),
        logprobs=_logprobs(fields),
        cache_key=fields.text("prompt_cache_key", chars_max=SHORT_TEXT_CHARS_MAX),
        **generation,
    )
    fields.text("safety_identifier", chars_max=SHORT_TEXT_CHARS_MAX)
    refuse_unknown(fields)
    return conversation


def _turns(fields: Fields) -> tuple[Turn, ...]:
    unanswered = Unanswered()
    turns = [
        _turn(message, unanswered) for message in fields.objects("messages", count_max=MESSAGES_MAX)
    ]
    unanswered.settled("messages")
    return tuple(turns)


def _turn(message: Fields, unanswered: Unanswered) -> Turn:
    role = message.required_text("role")
    if role == "function":
        path = message.at("role")
        raise refuse(Code.UNSUPPORTED, f"{path}: functions are not supported here", param=path)
    if role not in _ROLES:
        raise bad(message.at("role"), f"must be one of {', '.join(_ROLES)}")
    if role == "tool":
        turn = _result(message, unanswered)
    else:
        unanswered.settled(message.at("role"))
        turn = _said(message, _ROLES[role], unanswered)
    refuse_unknown(message)
    return turn


def _said(message: Fields, role: Role, unanswered: Unanswered) -> Turn:
    calls = read_calls(message) if role == "assistant" else ()
    thoughts = read_thoughts(message) if role == "assistant" else ()
    for name, accepted in _MESSAGE_NEUTRAL.items():
        message.neutral(name, accepted)
    for call in calls:
        unanswered.called(call, message.at("tool_calls"))
    if calls and message.says_nothing("content", ("", [])):
        return Turn(role=role, content="", calls=calls, thoughts=thoughts)
    content = _content(message, *(("image_url",) if role == "user" else ()))
    if not content.text and not content.images:
        raise bad(message.at("content"), "must not be empty")
    images = tuple(content.images)
    return Turn(role=role, content=content.text, images=images, calls=calls, thoughts=thoughts)


def _result(message: Fields, unanswered: Unanswered) -> Turn:
    path = message.at("tool_call_id")
    call_id = message.required_text("tool_call_id")
    message.text("name")  # the call knows it
    tool = unanswered.answered(call_id, path)
    return Turn(role="tool", content=_content(message).text, call_id=call_id, tool=tool)


def _content(message: Fields, *kinds: str) -> Written:
    content = message.text_or_objects("content", count_max=PARTS_MAX)
    if isinstance(content, str):
        return written([content])
    return written(_part(part, kinds) for part in content)


def _part(part: Fields, kinds: tuple[str, ...]) -> str | Image:
    kind = part.required_text("type")
    if kind != "text" and kind not in kinds:
        path = part.at("type")
        allowed = " and ".join(("text", *kinds))
        message = f"{path}: only {allowed} parts are supported here"
        raise refuse(Code.UNSUPPORTED, message, param=path)
    part.neutral("prompt_cache_breakpoint")
    piece = part.required_text("text") if kind == "text" else _image(part)
    refuse_unknown(part)
    return piece


def _image(part: Fields) -> Image:
    told = part.nested("image_url")
    if told is None:
        raise missing(part.at("image_url"))
    url, detail = told.required_text("url"), read_detail(told)
    refuse_unknown(told)
    return image_at(told.at("url"), url, detail, part.at("image_url"))


def read_detail(fields: Fields) -> Detail:
    """Take it: how closely an image is to be looked at. Raises RefusedError."""
    told = fields.choice("detail", *DETAILS)
    return next((detail for detail in DETAILS if detail == told), "auto")


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1)
    new = fields.integer("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise refuse(
            Code.BAD_REQUEST,
            f"max_tokens ({old}) and max_completion_tokens ({new}) disagree: send one of them",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    if top is not None and not wanted:
        raise bad("top_logprobs", "is only allowed when 'logprobs' is true")
    return (top or 0) if wanted else None
