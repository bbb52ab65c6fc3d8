"""Which sequences get how many tokens in the next step: `{sequence: number}`, nothing else.

There are no phases. Prefill, chunk, decode, the tail after a prefix hit and the recompute
after a preemption are that one number: each step tries to make `num_computed` catch up.

    1. decodes    every running sequence with one token to go, by class and arrival
    2. prefills   running and waiting ones together, by class and arrival, of what `pace` allows
                  beside those decodes; while several compete none gets over half the step, then
                  what is left is dealt again
    room          a sequence that needs a block takes it from the last in line; the last in
                  line itself waits with what it holds, so the first always advances

Pure: no clock, no KV, no text. Invariant: only running sequences hold KV blocks; a waiting one
may hold host blocks, where its KV was moved when it was preempted. The step is `turn`.
"""

from collections import Counter, abc

from core.protocol import TokenLogprob
from worker.admission import SchedulerConfig, prefill_tokens
from worker.blocks import BlockPool
from worker.forecast import Forecast
from worker.integrity import line_problems, slot_problems
from worker.line import Line
from worker.pace import Pace
from worker.sequence import Sequence, State, Wait
from worker.step import Sampled, StepPlan, StepResult
from worker.swap import Leaving
from worker.tables import Tables
from worker.turn import Parts, Turn


class Scheduler:
    """One engine's queue and running set over one block pool.

    Callers alternate `schedule` and one of `complete` and `failed`; `add`, `finish`, `end`,
    `preempt` and the pool's `flush` may come between.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool | None = None) -> None:
        self.config = config
        self.pool = pool or BlockPool(
            config.kv_blocks,
            config.block_tokens,
            host_blocks=config.host_blocks,
            marked_share=config.marked_share,
        )
        self.forecast = Forecast(config)
        self.pace = Pace(
            target_ms=config.itl_target_ms,
            stretch=config.itl_stretch,
            token_ms=config.token_ms,
            copy_block_ms=config.copy_block_ms,
        )
        self.num_preemptions = 0
        self.num_swaps = 0  # of those, the ones whose KV went to host memory
        self._one_block = Leaving(blocks_out=1, blocks_in=1, tokens=config.block_tokens)
        self._line = Line(config.max_sequences)
        self._tables = Tables(self.pool)
        self._parts = Parts(config, self._line, self.pool, self._tables, self.forecast, self.pace)
        self._requests: dict[str, list[Sequence]] = {}
        self._numbered: dict[int, Sequence] = {}

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """Those without a slot, in no order."""
        return self._line.waiting

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Those with a slot, in no order."""
        return self._line.running

    @property
    def has_work(self) -> bool:
        """Whether another step is due."""
        return bool(self.waiting or self.running)

    @property
    def waiting_tokens(self) -> int:
        """Prefill tokens of the waiting list, prefix hits not counted."""
        return sum(prefill_tokens([sequence, *sequence.forks]) for sequence in self.waiting)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that the waiting list's tokens will take, prefix hits not counted."""
        return sum(self.pool.blocks_for(sequence.num_tokens) for sequence in self.waiting)

    @property
    def waits(self) -> Counter[Wait]:
        """How many wait for what, as of the last step."""
        return Counter(sequence.wait for sequence in self.waiting)

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Queue one request. Its first sequence computes the prompt, the others fork from it.

        The caller has asked `refuse`.
        """
        first, *forks = sequences
        assert first.request not in self._requests
        for sequence in sequences:
            sequence.chain = self.pool.chain(sequence.root, sequence.tokens)
            sequence.state = State.FORKING
        first.forks = forks
        self._requests[first.request] = list(sequences)
        self._numbered.update((sequence.number, sequence) for sequence in sequences)
        self._line.wait(first)

    def schedule(self, now_ms: int = 0) -> StepPlan | None:
        """Decide the next step and take its blocks; None when there is no work.

        `now_ms` is for cache marks, on any clock that does not go back.
        """
        self.pool.advance(now_ms)
        self.pool.demotes = self.pace.swap_is_cheaper(self._one_block)
        for sequence in self.waiting:
            sequence.wait = Wait.TOKENS
            sequence.steps_waited += 1
            sequence.overdue |= sequence.steps_waited > self.config.patience_steps
        turn = Turn(self._parts)
        turn.decide()
        self._count(turn)
        plan = turn.plan()
        assert plan or not self.has_work, "the first in line always advances"
        return plan

    def complete(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, Sampled]]:
        """Take over what the step computed: KV is valid, tokens are appended, choices fork.

        Returns the sequences that got a token, or the fault in its place, in row order; the
        caller ends those with a fault, and where that is ours nobody finds their KV any more.
        Sequences that ended since `schedule` are passed over.
        """
        sampled = iter(result.sampled)
        drawn: list[tuple[Sequence, Sampled]] = []
        for row in plan.rows:
            token = next(sampled) if row.draw else None
            sequence = self._numbered.get(row.sequence)
            if sequence is None:
                continue
            self._tables.computed(sequence, len(row.token_ids))
            if sequence.forks and sequence.num_computed >= sequence.num_prompt:
                self._fork(sequence)
            if token is not None:
                if not token.fault:
                    sequence.tokens.append(token.token_id)
                elif not token.unanswerable:
                    self.pool.withdraw(sequence.blocks)
                drawn.append((sequence, token))
        return drawn

    def preempt(self, sequence: Sequence) -> None:
        """Stop one that runs, between two steps, as if others needed its room."""
        turn = Turn(self._parts)
        turn.preempt(sequence)
        self._count(turn)

    def failed(self, plan: StepPlan) -> None:
        """The runner raised: nobody may read what it was to move. The caller ends the rows."""
        lost = {host_block for _, host_block in plan.moves_out}
        self.pool.failed(lost, (block for _, block in (*plan.copies, *plan.moves_in)))
        for sequence in self.waiting:
            if sequence.stowed is not None and not lost.isdisjoint(sequence.stowed.tail):
                self._tables.unstow(sequence)

    def observed(self, plan: StepPlan, step_ms: float) -> None:
        """The step took so long: what the next ones may take of prefill follows."""
        sizes = [len(row.token_ids) for row in plan.rows]
        decode_rows = sizes.count(1)
        self.pace.observed(
            step_ms,
            decode_rows=decode_rows,
            prefill_tokens=sum(sizes) - decode_rows,
            moved_blocks=len(plan.moves_out) + len(plan.moves_in),
        )

    def prompted(
        self, plan: StepPlan, result: StepResult
    ) -> list[tuple[Sequence, int, tuple[TokenLogprob, ...]]]:
        """What the step tells of prompts: whose, from which position on, and each token once."""
        answers = iter(result.targets)
        told = [(row, next(answers)) for row in plan.rows if row.targets]
        return [
            (sequence, *sequence.tell(row.start + 1, logprobs))
            for row, logprobs in told
            if (sequence := self._numbered.get(row.sequence))
        ]

    def finish(self, sequence: Sequence) -> None:
        """It has all its tokens: give its blocks back."""
        self.forecast.finished(sequence)
        siblings = self._requests[sequence.request]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request]
        self._remove(sequence)

    def end(self, request: str) -> None:
        """Drop all of a request's sequences, whatever they are doing. Unknown ones are fine."""
        for sequence in self._requests.pop(request, ()):
            self._remove(sequence)

    def requests_in(self, plan: StepPlan) -> list[str]:
        """The requests of the plan's rows, each once; those that ended since are left out."""
        rows = (self._numbered.get(row.sequence) for row in plan.rows)
        return list(dict.fromkeys(sequence.request for sequence in rows if sequence))

    def expired(self, now_ms: int) -> set[str]:
        """Requests whose deadline has come (Unix milliseconds). The caller ends them."""
        return {
            sequence.request
            for sequence in (*self.waiting, *self.running)
            if 0 < sequence.deadline_ms <= now_ms
        }

    def problems(self) -> list[str]:
        """What breaks an invariant of pool or queue; empty when all is well."""
        stowed = [sequence.stowed for sequence in self.waiting if sequence.stowed]
        return [
            *self.pool.problems(
                (sequence.blocks for sequence in self.running),
                ([*held.blocks, *held.tail] for held in stowed),
            ),
            *line_problems(self.waiting, self.running, self.config.block_tokens),
            *slot_problems(self._line.slots, self.running, self.config.max_sequences),
        ]

    def _count(self, turn: Turn) -> None:
        self.num_preemptions += turn.num_preempted
        self.num_swaps += turn.num_stowed

    def _fork(self, sequence: Sequence) -> None:
        """Its prompt is computed: its siblings share the blocks, and compute the last token."""
        for fork in sequence.forks:
            if self._line.is_full:
                self._line.wait(fork)
                continue
            self._tables.share(sequence, fork)
            self._line.run(fork)
        sequence.forks = []

    def _remove(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._tables.release(sequence)
            self._line.stop(sequence)
        elif sequence.state is State.WAITING:
            self._tables.unstow(sequence)
            self._line.waiting.remove(sequence)
        sequence.state = State.ENDED
        del self._numbered[sequence.number]
