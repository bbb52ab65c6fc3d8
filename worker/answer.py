"""One choice of a generation as text: what a token sets free, and whether it ends the choice.

    end ids         the model's own, unless they are ignored, and stop ids: their text is left out
    stop strings    end the text before them
    a grammar       ends with the token that completes it
    min_tokens      come before any of these; max_tokens and the context end a choice anyway

Invariant: resumed tokens are replayed, so that a choice goes on as if it had never stopped.
"""

from collections.abc import Sequence as Sequence_
from typing import Protocol

from core.protocol import Choice, FinishReason, TokenLogprob, Tokens
from worker.detokenize import Detokenizer, TokenText
from worker.faults import BadRequestError
from worker.sequence import Sequence
from worker.step import Sampled


class AnswerGrammar(Protocol):
    """What is needed of a compiled grammar (`text.grammar.Compiled`)."""

    def follows(self, ids: Sequence_[int], /) -> bool | None:
        """Whether it is complete with these ids; None where they break it."""
        ...


class Answer:
    """One choice and its text.

    Raises BadRequestError when a resumed choice contradicts itself.
    """

    def __init__(
        self,
        sequence: Sequence,
        text: TokenText,
        choice: Choice,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.sequence = sequence
        self.finish: FinishReason | None = None
        eos_ids = frozenset() if sequence.sampling.ignore_eos else text.eos_ids
        self._end_ids = eos_ids | frozenset(sequence.sampling.stop_ids)
        self._detokenizer = Detokenizer(text, sequence.sampling.stop)
        self._unsent = self._replay(choice, grammar)

    def accept(self, sampled: Sampled) -> Tokens:
        """Take a new token, which the sequence already has."""
        released = self._advance(sampled.token_id, self.sequence.num_output)
        if sampled.ends and not self.finish:
            self.finish = "stop"
        released += self._close()
        logprobs = None if sampled.logprob is None else (sampled.logprob,)
        return self._tokens((sampled.token_id,), released, logprobs)

    def closed_by_replay(self) -> Tokens:
        """The last word on a choice that its resumed tokens had already finished."""
        assert self.finish
        return self._tokens((), "", None)

    def _replay(self, choice: Choice, grammar: AnswerGrammar | None) -> str:
        """Catch up with what earlier attempts produced; returns text they did not release."""
        complete = grammar.follows(choice.output_ids) if grammar and choice.output_ids else False
        if complete is None:
            raise BadRequestError("output_ids break the grammar")
        released = ""
        for count, token_id in enumerate(choice.output_ids, 1):
            released += self._advance(token_id, count)
            if self.finish:
                break
        if complete and not self.finish:
            self.finish = "stop"
        released += self._close()
        if choice.released_chars > len(released):
            raise BadRequestError("released_chars is beyond the text of output_ids")
        return released[choice.released_chars :]

    def _advance(self, token_id: int, count: int) -> str:
        """The text that a token sets free, of which there are `count` with it."""
        least = self.sequence.sampling.min_tokens
        # min_tokens come before an end, and may hold all of a stop string. An end has no text.
        if token_id in self._end_ids and count > least:
            self.finish = "stop"
            return ""
        released = self._detokenizer.append(token_id, may_stop=count >= least)
        if self._detokenizer.stopped is not None:
            self.finish = "stop"
        return released

    def _close(self) -> str:
        """What is still held, if the answer is at its end."""
        sequence = self.sequence
        # A prompt that fills the context is not an answer at its end: it fits never.
        if not self.finish and sequence.num_output and sequence.num_tokens >= sequence.final_tokens:
            self.finish = "length"
        return self._detokenizer.finish() if self.finish else ""

    def _tokens(
        self, ids: tuple[int, ...], released: str, logprobs: tuple[TokenLogprob, ...] | None
    ) -> Tokens:
        unsent, self._unsent = self._unsent, ""
        return Tokens(
            choice=self.sequence.choice,
            ids=ids,
            text=unsent + released,
            logprobs=logprobs,
            finish=self.finish,
            stop=self._detokenizer.stopped if self.finish else None,
        )
