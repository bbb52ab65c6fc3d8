"""What a response says of thinking: the parameter, and items of what was thought.

    summary             the text, told where the caller asked for one
    encrypted_content   all of it with its signature, told where `include` asks: for a caller that
                        keeps its conversation itself. Opaque, and not encrypted: what is in it
                        is the caller's own to know.

One sealed elsewhere, or changed, is no thought of anybody's here: it is passed over.
"""

import base64
from typing import Any

import msgspec

from gateway.fields import PARTS_MAX, Fields
from gateway.items import ReasoningItem
from gateway.openai.generation import refuse_unknown
from gateway.openai.thinking import read_effort
from gateway.thinking import Thinking

SEAL = "hw1."
INCLUDE = "reasoning.encrypted_content"
_SUMMARIES = ("auto", "concise", "detailed")


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    text: str = ""
    signature: str = ""
    redacted: str = ""


_sealed = msgspec.msgpack.Decoder(_Sealed)


def read_reasoning(fields: Fields) -> tuple[Thinking | None, dict[str, Any]]:
    """Take `reasoning`, with what the answer repeats of it. Raises RefusedError."""
    reasoning = fields.nested("reasoning")
    if reasoning is None:
        return None, {"effort": None, "summary": None}
    summary = reasoning.choice("summary", *_SUMMARIES)
    old = reasoning.choice("generate_summary", *_SUMMARIES)
    reasoning.neutral("context", ("auto",))
    reasoning.neutral("mode", ("standard",))
    effort, wanted = reasoning.peek("effort"), summary or old
    thinking = read_effort(reasoning, "effort", display="summarized" if wanted else None)
    if thinking is not None and wanted and not thinking.asked and thinking.mode != "off":
        path = reasoning.at("summary" if summary else "generate_summary")
        thinking = msgspec.structs.replace(thinking, asked=(path,))
    refuse_unknown(reasoning)
    return thinking, {"effort": effort, "summary": wanted}


def read_item(fields: Fields, name: str, *, whole: bool) -> ReasoningItem:
    """Take an item's fields. Raises RefusedError."""
    sealed = fields.text("encrypted_content")
    summary = _parts(fields, "summary", "summary_text")
    text = _parts(fields, "content", "reasoning_text") or summary
    known = None if sealed is None else _opened(sealed)
    if known is None:
        return ReasoningItem(id=name, text=text, whole=whole)
    return ReasoningItem(
        id=name,
        text=known.text,
        signature=known.signature,
        redacted=known.redacted,
        whole=whole,
    )


def item_fields(item: ReasoningItem, *, shown: bool, sealed: bool) -> dict[str, Any]:
    """What it says beside its name."""
    told: dict[str, Any] = {"summary": summary_of(item.text) if shown else []}
    if sealed:
        told["encrypted_content"] = _seal(item)
    return told


def summary_of(text: str) -> list[dict[str, str]]:
    """In one part, if there is any."""
    return [{"type": "summary_text", "text": text}] if text else []


def _parts(fields: Fields, name: str, kind: str) -> str:
    if fields.says_nothing(name, ([],)):
        return ""
    texts = []
    for part in fields.objects(name, count_max=PARTS_MAX):
        part.neutral("type", (kind,))
        texts.append(part.text("text") or "")
        refuse_unknown(part)
    return "\n".join(texts)


def _seal(item: ReasoningItem) -> str:
    raw = msgspec.msgpack.encode(_Sealed(item.text, item.signature, item.redacted))
    return SEAL + base64.b64encode(raw).decode()


def _opened(sealed: str) -> _Sealed | None:
    if not sealed.startswith(SEAL):
        return None
    try:
        return _sealed.decode(base64.b64decode(sealed.removeprefix(SEAL)))
    except (ValueError, msgspec.MsgspecError):
        return None
