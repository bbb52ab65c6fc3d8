"""`POST /v1/responses` and its count of tokens: a body into a `Conversation`.

The conversation has the turns of its own input; what `previous_response_id` names is put before
them later (`continued`), once it is known. Functions are the only tools: those that the API's own
servers run are refused by name, as is whatever else would change the answer and is not served.
"""

from collections.abc import Sequence

import msgspec

from core.errors import Code, refuse
from gateway.conversation import Conversation
from gateway.fields import (
    MODEL_CHARS_MAX,
    SHORT_TEXT_CHARS_MAX,
    Fields,
    bad,
    read_object,
    read_timeout,
)
from gateway.items import Ask, Item
from gateway.openai.generation import (
    DIALECT,
    INDEX,
    SERVICE_CLASSES,
    TIERS,
    read_metadata,
    read_top_p,
    refuse_unknown,
)
from gateway.responses.items import read_items, turns_of
from gateway.responses.reasoning import INCLUDE, read_reasoning
from gateway.responses.structure import read_text
from gateway.responses.tools import read_toolbox
from gateway.tools.structured import structure_of

OUTPUT_TOKENS_MIN = 1
TOP_LOGPROBS_MAX = 20
ID_CHARS_MAX = 256
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, INCLUDE)  # what an answer may be asked to hold besides

# Parameters we do not support, and the values of each that change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
}


def parse_response(body: bytes) -> Conversation:
    """The request, or RefusedError naming the field at fault."""
    fields = read_object(body, index=INDEX)
    conversation = _conversation(fields)
    _stream_options(fields, stream=conversation.stream)
    refuse_unknown(fields)
    return conversation


def parse_input_tokens(body: bytes) -> Conversation:
    """What is counted: any request for a response, of which the rest changes nothing."""
    fields = read_object(body, index=INDEX)
    fields.neutral("personality")
    fields.neutral("conversation")
    thinking, _ = read_reasoning(fields)
    toolbox, tool_choice, tools = read_toolbox(fields)
    read_text(fields)
    shorten = fields.choice("truncation", "auto", "disabled") == "auto"
    conversation = Conversation(
        dialect=DIALECT,
        kind="chat",
        model=fields.required_text("model", chars_max=MODEL_CHARS_MAX),
        toolbox=toolbox,
        thinking=thinking,
        ask=Ask(
            items=read_items(fields),
            instructions=fields.text("instructions"),
            previous_id=_previous(fields),
            keep=False,
            shorten=shorten,
            shown={"tool_choice": tool_choice, "tools": tools},
        ),
    )
    refuse_unknown(fields)
    return conversation


def continued(conversation: Conversation, before: Sequence[Item]) -> Conversation:
    """With what came before it. Raises RefusedError where the two do not belong together."""
    ask = conversation.ask
    assert ask is not None
    turns = turns_of(ask.instructions, [*before, *ask.items])
    return msgspec.structs.replace(conversation, turns=turns)


def _conversation(fields: Fields) -> Conversation:
    for name, accepted in NEUTRAL.items():
        fields.neutral(name, accepted)
    thinking, reasoning = read_reasoning(fields)
    fields.integer("max_tool_calls", 1)  # of tools that the API's own servers run: there are none
    toolbox, tool_choice, tools = read_toolbox(fields)
    asked, text = read_text(fields)
    structure = structure_of(asked, toolbox)
    tier = fields.choice("service_tier", *TIERS) or "auto"
    instructions, previous_id = fields.text("instructions"), _previous(fields)
    keep = fields.boolean("store") is not False
    shorten = fields.choice("truncation", "auto", "disabled") == "auto"
    included = _included(fields)
    logprobs = _logprobs(fields, included, tools=toolbox is not None and toolbox.mode != "none")
    conversation = Conversation(
        dialect=DIALECT,
        kind="chat",
        model=fields.required_text("model", chars_max=MODEL_CHARS_MAX),
        toolbox=toolbox,
        thinking=thinking,
        grammar=structure.grammar if structure else None,
        grammar_param=structure.param if structure else "",
        max_tokens=fields.integer("max_output_tokens", OUTPUT_TOKENS_MIN),
        temperature=fields.number("temperature", 0, 2),
        top_p=read_top_p(fields),
        logprobs=logprobs,
        stream=fields.boolean("stream") or False,
        service_class=SERVICE_CLASSES[tier],
        user=fields.text("user", chars_max=SHORT_TEXT_CHARS_MAX),
        cache_key=fields.text("prompt_cache_key", chars_max=SHORT_TEXT_CHARS_MAX),
        deadline_s=read_timeout(fields),
    )
    metadata = read_metadata(fields)
    shown = {
        "instructions": instructions,
        "max_output_tokens": conversation.max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": toolbox is None or toolbox.parallel,
        "previous_response_id": previous_id,
        "prompt_cache_key": conversation.cache_key,
        "reasoning": reasoning,
        "safety_identifier": fields.text("safety_identifier", chars_max=SHORT_TEXT_CHARS_MAX),
        "temperature": conversation.temperature,
        "text": text,
        "tool_choice": tool_choice,
        "tools": tools,
        "top_logprobs": logprobs or 0,
        "top_p": conversation.top_p,
        "truncation": "auto" if shorten else "disabled",
        "user": conversation.user,
    }
    ask = Ask(
        items=read_items(fields),
        instructions=instructions,
        previous_id=previous_id,
        keep=keep,
        shorten=shorten,
        shown=shown,
        shows_thoughts=thinking is not None and thinking.display == "summarized",
        seals_thoughts=INCLUDE in included,
    )
    return msgspec.structs.replace(
        conversation, ask=ask, metadata=tuple(metadata.items()), tier_asked=True
    )


def _previous(fields: Fields) -> str | None:
    return fields.text("previous_response_id", chars_max=ID_CHARS_MAX)


def _included(fields: Fields) -> tuple[str, ...]:
    included = fields.strings("include", count_max=len(INCLUDABLE) * 2, chars_max=64)
    for i, name in enumerate(included):
        if name not in INCLUDABLE:
            path = f"include[{i}]"
            raise refuse(Code.UNSUPPORTED, f"{path}: '{name}' is not served here", param=path)
    return included


def _logprobs(fields: Fields, included: tuple[str, ...], *, tools: bool) -> int | None:
    top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    if LOGPROBS not in included:
        if top:
            raise bad("top_logprobs", f"is only allowed when 'include' has '{LOGPROBS}'")
        return None
    if tools:
        message = "include: logprobs are not supported beside tools here"
        raise refuse(Code.UNSUPPORTED, message, param="include")
    return top or 0


def _stream_options(fields: Fields, *, stream: bool) -> None:
    options = fields.nested("stream_options")
    if options is None:
        return
    if not stream:
        raise bad("stream_options", "is only allowed when 'stream' is true")
    options.neutral("include_obfuscation", (False,))
    refuse_unknown(options)
