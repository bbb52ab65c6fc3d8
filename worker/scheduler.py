"""Which sequences get how many tokens in the next step: `{sequence: number}`, nothing else.

There are no phases. Prefill, chunk, decode, the tail after a prefix hit and the recompute
after a preemption are that one number: each step tries to make `num_computed` catch up.

    1. decodes    every running sequence with one token to go, by class and arrival
    2. prefills   running and waiting ones together, by class and arrival; while several
                  compete none gets over half the step, then what is left is dealt again
    room          a sequence that needs a block takes it from the last in line; the last in
                  line itself waits with what it holds, so the first always advances

Pure: no clock, no KV, no text. Invariant: only running sequences hold KV blocks.
"""

from collections import abc

from core.protocol import TokenLogprob
from worker.admission import Forecast, SchedulerConfig, prefill_tokens
from worker.blocks import BlockPool
from worker.sequence import Sequence, State
from worker.step import Row, Sampled, StepPlan, StepResult


class _Step:
    """The step being decided. Taking a sequence out of it undoes all it was given."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.counts: dict[Sequence, int] = {}
        self.copies: dict[Sequence, tuple[int, int]] = {}
        self.closed = False  # to admissions
        self.growth: int | None = None  # of all that run, in blocks; None: to be computed

    def undo(self, sequence: Sequence) -> None:
        self.budget += self.counts.pop(sequence, 0)
        self.copies.pop(sequence, None)


class Scheduler:
    """One engine's queue and running set over one block pool.

    Callers alternate `schedule` and `complete`; `add`, `finish` and `end` may come between.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool | None = None) -> None:
        self.config = config
        self.pool = pool or BlockPool(config.kv_blocks, config.block_tokens)
        self.forecast = Forecast(config)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._numbered: dict[int, Sequence] = {}
        self._slots = list(range(config.max_sequences - 1, -1, -1))  # free ones, lowest last

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

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Queue one request. Its first sequence computes the prompt, the others fork from it.

        The caller has asked `refuse`.
        """
        first, *forks = sequences
        assert first.request not in self._requests
        for fork in forks:
            fork.state = State.FORKING
        first.forks = forks
        self._requests[first.request] = list(sequences)
        self._numbered.update((sequence.number, sequence) for sequence in sequences)
        self.waiting.append(first)

    def schedule(self) -> StepPlan | None:
        """Decide the next step and take its blocks; None when there is no work."""
        step = _Step(self.config.max_batched_tokens)
        for sequence in self.waiting:
            sequence.steps_waited += 1
            sequence.overdue |= sequence.steps_waited > self.config.patience_steps
        for sequence in sorted(self.running, key=_priority):
            if sequence.state is State.RUNNING and sequence.remaining == 1:
                self._feed(step, sequence, 1)
        self._prefills(step)
        self._deal_rest(step)
        assert step.counts or not self.has_work, "the first in line always advances"
        return _plan(step) if step.counts else None

    def complete(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, Sampled]]:
        """Take over what the step computed: KV is valid, tokens are appended, choices fork.

        Returns the sequences that got a token, or the fault in its place, in row order; the
        caller ends those with a fault. Sequences that ended since `schedule` are passed over.
        """
        sampled = iter(result.sampled)
        drawn: list[tuple[Sequence, Sampled]] = []
        for row in plan.rows:
            token = next(sampled) if row.draw else None
            sequence = self._numbered.get(row.sequence)
            if sequence is None:
                continue
            self._computed(sequence, len(row.token_ids))
            self._fork(sequence)
            if token is not None:
                if not token.fault:
                    sequence.tokens.append(token.token_id)
                drawn.append((sequence, token))
        return drawn

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
        found = self.pool.problems(sequence.blocks for sequence in self.running)
        for state, sequences in ((State.WAITING, self.waiting), (State.RUNNING, self.running)):
            for sequence in sequences:
                held = self.pool.blocks_for(sequence.num_computed) <= len(sequence.blocks)
                if sequence.state is not state or not held:
                    found.append(f"sequence {sequence.number}: {sequence.state}, out of place")
        slots = sorted([*self._slots, *(sequence.slot for sequence in self.running)])
        if slots != list(range(self.config.max_sequences)):
            found.append(f"slots free or in use: {slots}")
        return found

    def _prefills(self, step: _Step) -> None:
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        candidates = sorted(prefilling + self.waiting, key=_priority)
        most = step.budget if len(candidates) == 1 else self.config.max_batched_tokens // 2
        for sequence in candidates:
            if not step.budget:
                return
            if sequence.state is State.RUNNING:
                self._feed(step, sequence, max(1, most))
            elif not step.closed:
                self._admit(step, sequence, max(1, most))

    def _deal_rest(self, step: _Step) -> None:
        for sequence, given in step.counts.items():
            room = self._room(sequence) - given
            more = min(step.budget, sequence.remaining - given, room)
            if more > 0:
                self._give(step, sequence, more)

    def _feed(self, step: _Step, sequence: Sequence, most: int) -> None:
        while (room := self._room(sequence)) < 1:
            last = max(self.running, key=_priority)
            if last is sequence:
                return
            self._preempt(step, last)
        self._begin(step, sequence)
        self._give(step, sequence, min(most, step.budget, sequence.remaining, room))

    def _room(self, sequence: Sequence) -> int:
        """Positions after `num_computed` that fit without taking a block from anybody."""
        copy = self._shares_next(sequence)
        blocks = len(sequence.blocks) + self.pool.num_available - copy
        return blocks * self.config.block_tokens - sequence.num_computed

    def _shares_next(self, sequence: Sequence) -> bool:
        index = sequence.num_computed // self.config.block_tokens
        return index < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[index])

    def _begin(self, step: _Step, sequence: Sequence) -> None:
        """Make the block of the first new position this sequence's own."""
        index = sequence.num_computed // self.config.block_tokens
        if index == len(sequence.blocks):
            return
        block = sequence.blocks[index]
        if not self.pool.is_shared(block):
            self.pool.begin_write(block)
            return
        [copy] = self.pool.take(1)
        sequence.blocks[index] = copy
        step.copies[sequence] = (block, copy)
        self.pool.release([block])

    def _give(self, step: _Step, sequence: Sequence, number: int) -> None:
        given = step.counts.get(sequence, 0) + number
        blocks = self.pool.blocks_for(sequence.num_computed + given) - len(sequence.blocks)
        sequence.blocks += self.pool.take(blocks)
        step.counts[sequence] = given
        step.budget -= number

    def _admit(self, step: _Step, sequence: Sequence, most: int) -> None:
        hits = self.pool.match(sequence.root, sequence.tokens, sequence.hits_max)
        if not self._fits(step, sequence, hits) and not self._displace(step, sequence, hits):
            # Everyone behind a missing slot misses it too. Blocks are another matter: a
            # small one may pass a large one, until the large one has waited long enough.
            step.closed |= sequence.overdue or self._is_full
            return
        self.waiting.remove(sequence)
        self._run(sequence)
        step.growth = None
        self.pool.hold(hits)
        sequence.blocks = hits
        sequence.num_computed = len(hits) * self.config.block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        room = self._room(sequence)
        self._give(step, sequence, min(most, step.budget, sequence.remaining, room))

    def _run(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        sequence.state = State.RUNNING
        sequence.slot = self._slots.pop()
        sequence.slot_opened = False

    def _stop(self, sequence: Sequence) -> None:
        """It runs no more: its blocks and its slot are free."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._slots.append(sequence.slot)
        sequence.slot = -1

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.config.max_sequences

    def _fits(self, step: _Step, sequence: Sequence, hits: list[int]) -> bool:
        if self._is_full:
            return False
        return not self.running or self._missing(step, sequence, hits) <= 0

    def _missing(self, step: _Step, sequence: Sequence, hits: list[int]) -> int:
        """Blocks too few for it beside the expected growth of all that run."""
        if step.growth is None:
            step.growth = sum(map(self.forecast.growth, self.running))
        spare = self.pool.num_available - self.pool.num_unheld(hits)
        needed = self.forecast.blocks_with_forks(sequence) - len(hits)
        return needed + step.growth + self.forecast.headroom - spare

    def _displace(self, step: _Step, sequence: Sequence, hits: list[int]) -> bool:
        """Preempt lower classes until it fits, unless that would not be enough."""
        lower = [
            other for other in self.running if other.rank > sequence.rank and not other.overdue
        ]
        lower.sort(key=_priority)
        gain = sum(len(other.blocks) + self.forecast.growth(other) for other in lower)
        if not lower or (
            len(lower) < len(self.running) and gain < self._missing(step, sequence, hits)
        ):
            return False
        while lower and not self._fits(step, sequence, hits):
            self._preempt(step, lower.pop())
        return self._fits(step, sequence, hits)

    def _preempt(self, step: _Step, sequence: Sequence) -> None:
        """Back to the queue, to be recomputed, mostly from its own cached blocks."""
        step.undo(sequence)
        step.closed = True  # what was freed is for those that run
        step.growth = None
        self._stop(sequence)
        sequence.num_computed = 0
        sequence.state = State.WAITING
        self.waiting.append(sequence)
        self.forecast.preempted()
        self.num_preemptions += 1

    def _computed(self, sequence: Sequence, number: int) -> None:
        full = sequence.num_computed // self.config.block_tokens
        sequence.num_computed += number
        blocks = range(full, sequence.num_computed // self.config.block_tokens)
        self.pool.publish(sequence.root, sequence.tokens, sequence.blocks, blocks)

    def _fork(self, sequence: Sequence) -> None:
        """Its prompt is computed: its siblings share the blocks, and compute the last token."""
        if not sequence.forks or sequence.num_computed < sequence.num_prompt:
            return
        for fork in sequence.forks:
            if self._is_full:
                fork.state = State.WAITING
                self.waiting.append(fork)
                continue
            fork.num_computed = min(fork.num_prompt, fork.num_tokens - 1)
            fork.blocks = sequence.blocks[: self.pool.blocks_for(fork.num_computed)]
            self.pool.hold(fork.blocks)
            self._run(fork)
        sequence.forks = []

    def _remove(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.ENDED
        del self._numbered[sequence.number]


def _priority(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority


def _plan(step: _Step) -> StepPlan:
    return StepPlan(
        rows=tuple(_row(sequence, number) for sequence, number in step.counts.items()),
        copies=tuple(step.copies.values()),
    )


def _row(sequence: Sequence, number: int) -> Row:
    start = sequence.num_computed
    end = start + number
    return Row(
        sequence=sequence.number,
        token_ids=tuple(sequence.tokens[start:end]),
        start=start,
        blocks=tuple(sequence.blocks),
        draw=sequence.draw() if end == sequence.num_tokens else None,
        targets=sequence.targets(start, end),
        target_logprobs=sequence.sampling.prompt_logprobs or 0,
    )
