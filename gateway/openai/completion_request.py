"""`POST /v1/completions`, the legacy text interface: a body into a `Conversation`.

One prompt per request, as text or as token ids. `max_tokens` defaults to 16, as it always has
in this interface.
"""

from core.errors import Code, refuse
from gateway.conversation import Conversation
from gateway.fields import INTEGER_MAX, Fields, bad, missing, read_object, unsupported, wrong_kind
from gateway.openai.generation import DIALECT, INDEX, read_generation, refuse_unknown
from gateway.openai.structure import read_structure

MAX_TOKENS_DEFAULT = 16
LOGPROBS_MAX = 5
PROMPT_IDS_MAX = 1_000_000

_PROMPT_KINDS = "a string or an array of token ids"


def parse_completion(body: bytes) -> Conversation:
    """The request, or RefusedError naming the field at fault."""
    fields = read_object(body, index=INDEX)
    generation = read_generation(fields)
    fields.neutral("suffix", ("",))
    best_of = fields.integer("best_of", 1)
    if best_of is not None and best_of != generation["n"]:
        raise unsupported("best_of", (generation["n"],))
    structure = read_structure(fields)
    conversation = Conversation(
        dialect=DIALECT,
        kind="text",
        prompt=_prompt(fields),
        grammar=structure.grammar if structure else None,
        grammar_param=structure.param if structure else "",
        max_tokens=fields.integer("max_tokens", 1) or MAX_TOKENS_DEFAULT,
        logprobs=fields.integer("logprobs", 0, LOGPROBS_MAX),
        echo=fields.boolean("echo") or False,
        **generation,
    )
    refuse_unknown(fields)
    return conversation


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    value = fields.take("prompt")
    if value is None:
        raise missing("prompt")
    path = "prompt"
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise refuse(
                Code.UNSUPPORTED,
                f"prompt: one prompt per request is supported here, got {len(value)}",
                param="prompt",
            )
        path, value = "prompt[0]", value[0]
    if not isinstance(value, str | list):
        raise wrong_kind(path, _PROMPT_KINDS, value)
    if not value:
        raise bad(path, "must not be empty")
    return value if isinstance(value, str) else _token_ids(path, value)


def _token_ids(path: str, ids: list[object]) -> tuple[int, ...]:
    if len(ids) > PROMPT_IDS_MAX:
        raise bad(path, f"must have at most {PROMPT_IDS_MAX} token ids, got {len(ids)}")
    checked = tuple(i for i in ids if type(i) is int and 0 <= i <= INTEGER_MAX)
    if len(checked) < len(ids):
        raise bad(path, f"must hold only token ids: integers from 0 to {INTEGER_MAX}")
    return checked
