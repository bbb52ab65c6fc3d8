"""A prompt's own logprobs, gathered from the frames that tell them before any token.

Attempts repeat each other here until one has told all of it. Invariant: tokens are those of
the prompt, in order, each once.
"""

from typing import Protocol

from core.protocol import Prompted
from gateway.conversation import Conversation, PromptToken
from gateway.relay.job import Job
from text.rules import TextRules


class Spelling(Protocol):
    """What is needed of a version's text rules."""

    def token_bytes(self, id: int, /) -> bytes:  # noqa: A002 -- the name is the contract's
        """What one token adds to a text."""
        ...


class PromptSoFar:
    """The tokens of which the logprobs are known, and the first, which has none."""

    def __init__(self, ids: tuple[int, ...], rules: Spelling) -> None:
        self._ids = ids
        self._rules = rules
        self._tokens = [PromptToken(id=ids[0], token=rules.token_bytes(ids[0]))]

    @property
    def tokens(self) -> tuple[PromptToken, ...]:
        """From the prompt's beginning on."""
        return tuple(self._tokens)

    @property
    def whole(self) -> bool:
        """Whether that is all of it."""
        return len(self._tokens) == len(self._ids)

    def take(self, frame: Prompted) -> bool:
        """Add what is new in it; false for a frame that is not of this prompt, or leaves a gap."""
        known = len(self._tokens)
        end = frame.start + len(frame.logprobs)
        ids = tuple(one.id for one in frame.logprobs)
        if not 0 < frame.start <= known or ids != self._ids[frame.start : end]:
            return False
        spell = self._rules.token_bytes
        self._tokens += [
            PromptToken(
                id=one.id,
                token=spell(one.id),
                logprob=one.logprob,
                top=tuple((id_, spell(id_), logprob) for id_, logprob in one.top),
            )
            for one in frame.logprobs[known - frame.start :]
        ]
        return True


def prompt_of(job: Job) -> PromptSoFar | None:
    """What is to be gathered for a job, if it tells of its prompt."""
    if job.sampling.prompt_logprobs is None:
        return None
    return PromptSoFar(job.prompt_ids, job.rules)


def echo_of(conversation: Conversation, rules: TextRules) -> str:
    """The prompt as its answers begin with it; nothing where that was not asked for."""
    if not conversation.echo:
        return ""
    prompt = conversation.prompt
    return prompt if isinstance(prompt, str) else rules.decode(prompt)
