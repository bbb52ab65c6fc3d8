"""How tokens are drawn beyond temperature and top_p: OpenAI's own penalties, and extensions.

Extensions have the names that vLLM gave them, so that its clients work here: `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `stop_token_ids`, `allowed_token_ids`, `bad_words`,
`ignore_eos` and `prompt_logprobs`. Whether ids are the model's is asked later, of its rules.
"""

from typing import TypedDict

from gateway.fields import COUNT_MAX, INTEGER_MAX, Fields, bad, wrong_kind

PENALTY_MAX = 2.0
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
BIAS_MAX = 100.0
BIASES_MAX = 1_024
ALLOWED_MAX = 1_000_000
STOP_IDS_MAX = 64
BAD_WORDS_MAX = 64
BAD_WORD_CHARS_MAX = 128
PROMPT_LOGPROBS_MAX = 20


class Draws(TypedDict):
    """Fields of a `Conversation`."""

    top_k: int | None
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    prompt_logprobs: int | None


def read_draws(fields: Fields, *, stream: bool) -> Draws:
    """Take them. Raises RefusedError."""
    repetition = fields.number("repetition_penalty", REPETITION_MIN, REPETITION_MAX)
    return Draws(
        top_k=fields.integer("top_k", 0),
        min_p=fields.number("min_p", 0, 1) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        frequency_penalty=fields.number("frequency_penalty", -PENALTY_MAX, PENALTY_MAX) or 0.0,
        presence_penalty=fields.number("presence_penalty", -PENALTY_MAX, PENALTY_MAX) or 0.0,
        logit_bias=_logit_bias(fields),
        allowed_ids=_allowed_ids(fields),
        bad_words=fields.strings(
            "bad_words", count_max=BAD_WORDS_MAX, chars_max=BAD_WORD_CHARS_MAX
        ),
        stop_ids=_ids(fields, "stop_token_ids", STOP_IDS_MAX),
        min_tokens=fields.integer("min_tokens", 0) or 0,
        ignore_eos=fields.boolean("ignore_eos") or False,
        prompt_logprobs=_prompt_logprobs(fields, stream=stream),
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """A map of ids, written as strings, to what is added to their logits."""
    value, path = fields.take("logit_bias"), fields.at("logit_bias")
    if value is None:
        return ()
    if type(value) is not dict:
        raise wrong_kind(path, "an object", value)
    if len(value) > BIASES_MAX:
        raise bad(path, f"must have at most {BIASES_MAX} ids, got {len(value)}")
    biases = Fields(dict(value), path, index="[{}]")
    return tuple((_id_named(path, name), _bias(biases, name)) for name in value)


def _id_named(path: str, name: str) -> int:
    # Another way of writing a number would name one id twice.
    if not (name.isascii() and name.isdigit() and len(name) <= len(str(COUNT_MAX))):
        raise bad(path, "must map token ids, as strings of digits, to numbers")
    if name != str(int(name)) or int(name) > INTEGER_MAX:
        raise bad(path, "must map token ids, as strings of digits, to numbers")
    return int(name)


def _bias(biases: Fields, name: str) -> float:
    bias = biases.number(name, -BIAS_MAX, BIAS_MAX)
    if bias is None:
        raise bad(biases.at(name), "must be a number")
    return bias


def _allowed_ids(fields: Fields) -> tuple[int, ...]:
    ids = _ids(fields, "allowed_token_ids", ALLOWED_MAX, empty=False)
    return tuple(dict.fromkeys(ids))


def _ids(fields: Fields, name: str, count_max: int, *, empty: bool = True) -> tuple[int, ...]:
    value, path = fields.take(name), fields.at(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise wrong_kind(path, "an array of token ids", value)
    if not value and not empty:
        raise bad(path, "must not be empty")
    if len(value) > count_max:
        raise bad(path, f"must have at most {count_max} token ids, got {len(value)}")
    ids = tuple(id_ for id_ in value if type(id_) is int and 0 <= id_ <= INTEGER_MAX)
    if len(ids) < len(value):
        raise bad(path, f"must hold only token ids: integers from 0 to {INTEGER_MAX}")
    return ids


def _prompt_logprobs(fields: Fields, *, stream: bool) -> int | None:
    wanted = fields.integer("prompt_logprobs", 0, PROMPT_LOGPROBS_MAX)
    if wanted is not None and stream:
        raise bad("prompt_logprobs", "is not available when 'stream' is true")
    return wanted
