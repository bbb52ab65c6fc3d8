"""What is wrong with a request in itself: no engine of this version could serve it.

Whether a good request fits is another question (`admission`). The gateway refuses all of
these first, in the caller's words; here they only keep one peer's bug from becoming ours.
"""

import math

from core.protocol import Choice, Generate, Sampling
from worker.detokenize import TokenText

CHOICES_MAX = 128
STOPS_MAX = 64
STOP_CHARS_MAX = 4096
LOGPROBS_MAX = 64
IDS_MAX = 4096  # of logit_bias, and words in bad_words
BIAS_MAX = 100
BAD_WORD_TOKENS_MAX = 32
PENALTY_MAX = 2
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
SEED_END = 1 << 63


class BadRequestError(ValueError):
    """The request contradicts itself or the version's text rules; the message says how."""


def fault(request: Generate, text: TokenText) -> str | None:
    """The first fault of prompt, choices and sampling, in words; None when there is none."""
    if not request.prompt_ids:
        return "the prompt is empty"
    if not _in_vocabulary(request.prompt_ids, text):
        return "a prompt id is outside the vocabulary"
    return _choices_fault(request.choices, text) or _sampling_fault(request.sampling, text)


def _in_vocabulary(ids: tuple[int, ...], text: TokenText) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < text.vocab_size)


def _choices_fault(choices: tuple[Choice, ...], text: TokenText) -> str | None:
    if not 0 < len(choices) <= CHOICES_MAX:
        return f"choices must number 1 to {CHOICES_MAX}"
    indexes = {choice.index for choice in choices}
    if len(indexes) < len(choices) or min(indexes) < 0:
        return "choice indexes must differ and not be negative"
    if not all(_in_vocabulary(choice.output_ids, text) for choice in choices):
        return "an output id is outside the vocabulary"
    if any(choice.released_chars < 0 for choice in choices):
        return "released_chars is negative"
    return None


def _sampling_fault(sampling: Sampling, text: TokenText) -> str | None:
    checks = (
        (0 <= sampling.seed < SEED_END, "seed must be 0 to 2**63 - 1"),
        (sampling.max_tokens > 0, "max_tokens must be positive"),
        (sampling.min_tokens >= 0, "min_tokens must not be negative"),
        (sampling.min_tokens <= sampling.max_tokens, "min_tokens is over max_tokens"),
        (0 <= sampling.temperature < math.inf, "temperature must be finite and not negative"),
        (0 < sampling.top_p <= 1, "top_p must be over 0 and at most 1"),
        (sampling.top_k >= 0, "top_k must not be negative"),
        (0 <= sampling.min_p <= 1, "min_p must be 0 to 1"),
        (0 <= (sampling.logprobs or 0) <= LOGPROBS_MAX, f"logprobs must be 0 to {LOGPROBS_MAX}"),
        (
            0 <= (sampling.prompt_logprobs or 0) <= LOGPROBS_MAX,
            f"prompt_logprobs must be 0 to {LOGPROBS_MAX}",
        ),
        (len(sampling.stop) <= STOPS_MAX, f"at most {STOPS_MAX} stop strings"),
        (
            all(0 < len(stop) <= STOP_CHARS_MAX for stop in sampling.stop),
            f"a stop string has 1 to {STOP_CHARS_MAX} characters",
        ),
        *_penalty_checks(sampling),
        *_ids_checks(sampling, text),
    )
    return next((message for holds, message in checks if not holds), None)


def _penalty_checks(sampling: Sampling) -> tuple[tuple[bool, str], ...]:
    low, high = REPETITION_MIN, REPETITION_MAX
    return (
        (low <= sampling.repetition_penalty <= high, f"repetition_penalty must be {low} to {high}"),
        (abs(sampling.frequency_penalty) <= PENALTY_MAX, "frequency_penalty must be -2 to 2"),
        (abs(sampling.presence_penalty) <= PENALTY_MAX, "presence_penalty must be -2 to 2"),
    )


def _ids_checks(sampling: Sampling, text: TokenText) -> tuple[tuple[bool, str], ...]:
    """Lists of ids, each bounded and within the vocabulary."""
    biased = tuple(id_ for id_, _ in sampling.logit_bias)
    words = sampling.bad_words
    return (
        (len(biased) <= IDS_MAX, f"logit_bias has at most {IDS_MAX} ids"),
        (len(set(biased)) == len(biased), "logit_bias has an id twice"),
        (
            all(abs(bias) <= BIAS_MAX for _, bias in sampling.logit_bias),
            f"a logit_bias must be -{BIAS_MAX} to {BIAS_MAX}",
        ),
        (_in_vocabulary(biased, text), "a logit_bias id is outside the vocabulary"),
        (_in_vocabulary(sampling.allowed_ids, text), "an allowed id is outside the vocabulary"),
        (len(sampling.stop_ids) <= STOPS_MAX, f"at most {STOPS_MAX} stop ids"),
        (_in_vocabulary(sampling.stop_ids, text), "a stop id is outside the vocabulary"),
        (len(words) <= IDS_MAX, f"at most {IDS_MAX} bad words"),
        (
            all(0 < len(word) <= BAD_WORD_TOKENS_MAX for word in words),
            f"a bad word has 1 to {BAD_WORD_TOKENS_MAX} tokens",
        ),
        (
            all(_in_vocabulary(word, text) for word in words),
            "an id of a bad word is outside the vocabulary",
        ),
    )
