"""What a worker is asked to draw with: the client's word, else the model's own default.

Here a conversation meets its model's vocabulary. Invariant: what leaves here a worker takes;
what it would refuse is a 400 that names the field.
"""

from collections.abc import Callable, Iterable, Iterator

from core.errors import Code, RefusedError, refuse
from core.protocol import Sampling
from gateway.conversation import Conversation
from text.chat import TextRefusedError
from text.rules import TextRules

BAD_WORD_TOKENS_MAX = 32
# Tokens told of a prompt, the likeliest beside its own included: they are held until all are there.
PROMPT_ENTRIES_MAX = 1 << 18


def sampling_of(
    conversation: Conversation,
    *,
    prompt_tokens: int,
    max_tokens: int,
    rules: TextRules,
    new_seed: Callable[[], int],
) -> Sampling:
    """For each choice of the answer. Raises RefusedError."""
    if conversation.min_tokens > max_tokens:
        raise _bad("min_tokens", f"is over the {max_tokens} tokens that the answer may have")
    _in_vocabulary("logit_bias", (id_ for id_, _ in conversation.logit_bias), rules)
    _in_vocabulary("allowed_token_ids", conversation.allowed_ids, rules)
    _in_vocabulary("stop_token_ids", conversation.stop_ids, rules)
    temperature, top_p, top_k = conversation.temperature, conversation.top_p, conversation.top_k
    defaults = rules.sampling
    return Sampling(
        seed=conversation.seed if conversation.seed is not None else new_seed(),
        max_tokens=max_tokens,
        min_tokens=conversation.min_tokens,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        min_p=conversation.min_p,
        repetition_penalty=conversation.repetition_penalty,
        frequency_penalty=conversation.frequency_penalty,
        presence_penalty=conversation.presence_penalty,
        logit_bias=conversation.logit_bias,
        allowed_ids=conversation.allowed_ids,
        bad_words=tuple(
            dict.fromkeys(ids for word in conversation.bad_words for ids in _spellings(word, rules))
        ),
        stop=conversation.stop,
        stop_ids=conversation.stop_ids,
        ignore_eos=conversation.ignore_eos,
        logprobs=conversation.logprobs,
        prompt_logprobs=_prompt_logprobs(conversation, prompt_tokens),
        grammar=conversation.grammar,
    )


def _prompt_logprobs(conversation: Conversation, prompt_tokens: int) -> int | None:
    """As many as anyone asked for: the field of that name, or the echo of a prompt."""
    asked = [conversation.prompt_logprobs, conversation.logprobs if conversation.echo else None]
    most = max((count for count in asked if count is not None), default=None)
    if most is not None and (most + 1) * prompt_tokens > PROMPT_ENTRIES_MAX:
        param = "logprobs" if conversation.prompt_logprobs is None else "prompt_logprobs"
        problem = f"{most} for each of {prompt_tokens} tokens are more than are told of a prompt"
        raise _bad(param, problem)
    return most


def _in_vocabulary(param: str, ids: Iterable[int], rules: TextRules) -> None:
    if any(id_ >= rules.vocab_size for id_ in ids):
        raise _bad(param, f"token ids of this model are from 0 to {rules.vocab_size - 1}")


def _spellings(word: str, rules: TextRules) -> Iterator[tuple[int, ...]]:
    """A word's tokens at the beginning of a text, and after a space, where they differ."""
    bare = word.lstrip()
    if not bare:
        raise _bad("bad_words", "a word must not be blank")
    for text in (bare, f" {bare}"):
        try:
            ids = rules.inner_ids(text)
        except TextRefusedError as error:
            raise _bad("bad_words", str(error)) from error
        if not 0 < len(ids) <= BAD_WORD_TOKENS_MAX:
            raise _bad("bad_words", f"a word has 1 to {BAD_WORD_TOKENS_MAX} tokens, not {len(ids)}")
        yield tuple(ids)


def _bad(param: str, problem: str) -> RefusedError:
    return refuse(Code.BAD_REQUEST, f"{param}: {problem}.", param=param)
