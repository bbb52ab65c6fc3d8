"""An accepted `Generate`: its choices, their text, its usage, and the events that tell it.

Knows nothing of blocks, steps or threads. Invariant: usage counts what this attempt produced;
tokens accepted from earlier attempts are read, never counted or emitted again.
"""

from collections.abc import Iterable, Iterator

from core.protocol import (
    Failed,
    FinishCause,
    Finished,
    Generate,
    Prompted,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)
from worker.answer import Answer, AnswerGrammar
from worker.detokenize import TokenText
from worker.faults import BadRequestError, fault
from worker.phases import Phases
from worker.prefix import chain_root
from worker.sequence import TTL_MS, Sequence, State
from worker.step import Sampled

# Logprobs of the prompt in one frame: with 64 alternatives each, they take a megabyte.
PROMPTED_MAX = 1024


def attempt_id(request_id: str, attempt: int) -> str:
    """How an attempt is named in `/abort` and in the engine."""
    return f"{request_id}:{attempt}"


class Generation:
    """One attempt at a request, in the engine. Times are milliseconds on one monotonic clock.

    Its `grammar` is only held, so that it stays compiled for as long as there is something to
    draw.
    """

    def __init__(
        self,
        request: Generate,
        answers: Iterable[Answer],
        arrived_ms: float,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.id = attempt_id(request.request_id, request.attempt)
        self.request = request
        self.grammar = grammar
        self.started = False
        self._answers = {answer.sequence.number: answer for answer in answers}
        self._output_tokens = 0
        self._phases = Phases(arrived_ms)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that still have tokens to make, in the order of the choices."""
        return [answer.sequence for answer in self._answers.values() if not answer.finish]

    @property
    def complete(self) -> bool:
        """Whether every choice is finished."""
        return all(answer.finish for answer in self._answers.values())

    def start(self, boot_id: str, now_ms: float) -> list[Started | Tokens]:
        """Its first step is due: `Started`, and the choices that came finished."""
        self.started = True
        self._phases.runs(now_ms, any_choice=True)
        closed = [answer for answer in self._answers.values() if answer.finish]
        usage = self.usage
        started = Started(
            boot_id=boot_id, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens
        )
        return [started, *(answer.closed_by_replay() for answer in closed)]

    def prompted(self, start: int, logprobs: tuple[TokenLogprob, ...]) -> list[Prompted]:
        """A step told logprobs of the prompt's tokens from `start` on."""
        return [
            Prompted(start=start + at, logprobs=logprobs[at : at + PROMPTED_MAX])
            for at in range(0, len(logprobs), PROMPTED_MAX)
        ]

    def scheduled(self, now_ms: float) -> None:
        """A step was decided, perhaps without it: it may be preempted, or run again."""
        runs = any(sequence.state is State.RUNNING for sequence in self.sequences)
        self._phases.runs(now_ms, any_choice=runs)

    def accept(self, sequence: Sequence, sampled: Sampled, now_ms: float) -> Tokens:
        """A step produced a token of this sequence."""
        self._output_tokens += 1
        self._phases.token(now_ms)
        return self._answers[sequence.number].accept(sampled)

    def finished(self, cause: FinishCause, now_ms: float) -> Finished:
        """The engine's last word, in absolute totals."""
        return Finished(
            cause=cause, usage=self.usage, timings=self._phases.timings(now_ms), journal_seq=0
        )

    def failed(self, code: str, message: str) -> Failed:
        """The last word on a fault that is ours: another replica may do better."""
        return Failed(code=code, message=message, retryable=True, usage=self.usage)

    def undrawn(self, sampled: Sampled) -> Failed:
        """The last word on a token that could not be drawn, ours or the request's own fault."""
        if sampled.unanswerable:
            return Failed(
                code="bad_request", message=sampled.fault, retryable=False, usage=self.usage
            )
        return self.failed("internal", sampled.fault)

    @property
    def usage(self) -> Usage:
        """Nothing before the first step; from then on the whole prompt."""
        if not self.started or self.came_finished:
            return Usage()
        reader = self._reader
        written = reader.written_tokens if reader else {}
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=(reader and reader.cached_tokens) or 0,
            cache_write_5m_tokens=written.get(TTL_MS["5m"], 0),
            cache_write_1h_tokens=written.get(TTL_MS["1h"], 0),
            output_tokens=self._output_tokens,
        )

    @property
    def came_finished(self) -> bool:
        """Whether its resumed tokens left nothing to compute."""
        return self.complete and not self._output_tokens

    @property
    def _reader(self) -> Sequence | None:
        # Only the first of a request's sequences is admitted by itself; the others share.
        sequences = (answer.sequence for answer in self._answers.values())
        return next((each for each in sequences if each.cached_tokens is not None), None)


def open_generation(
    request: Generate,
    text: TokenText,
    *,
    context_tokens: int,
    numbers: Iterator[int],
    arrived_ms: float,
    grammar: AnswerGrammar | None = None,
) -> Generation:
    """Build an attempt's state, its resumed tokens replayed. Raises BadRequestError."""
    problem = fault(request, text)
    if problem is not None:
        raise BadRequestError(problem)
    root = chain_root(request.version, "", request.tenant_salt)
    name = attempt_id(request.request_id, request.attempt)
    # Whoever resumes an answer has heard all of its prompt's logprobs, which come first.
    tells_prompt = request.sampling.prompt_logprobs is not None and not any(
        choice.output_ids for choice in request.choices
    )
    answers = [
        Answer(
            Sequence(
                number=next(numbers),
                request=name,
                choice=choice.index,
                prompt_ids=request.prompt_ids,
                output_ids=choice.output_ids,
                sampling=request.sampling,
                root=root,
                service_class=request.service_class,
                deadline_ms=request.deadline_ms,
                context_tokens=context_tokens,
                tells_prompt=tells_prompt and place == 0,
                marks=request.cache_marks,
            ),
            text,
            choice,
            grammar,
        )
        for place, choice in enumerate(request.choices)
    ]
    return Generation(request, answers, arrived_ms, grammar)
