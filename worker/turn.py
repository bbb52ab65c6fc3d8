"""One step being decided: each sequence's number of tokens, and who makes room for whom.

Lives for one call of `Scheduler.schedule`. Taking a sequence out of the step undoes all that it
was given, so what is decided late may overrule what was decided early.
"""

from typing import NamedTuple

from worker.admission import SchedulerConfig
from worker.blocks import BlockPool, Copy
from worker.forecast import Forecast
from worker.line import Line, by_priority
from worker.pace import Pace
from worker.prefix import Content
from worker.sequence import Sequence, State, Wait
from worker.step import Row, StepPlan
from worker.tables import Tables


class Parts(NamedTuple):
    """What one scheduler's turns work on."""

    config: SchedulerConfig
    line: Line
    pool: BlockPool
    tables: Tables
    forecast: Forecast
    pace: Pace


class Turn:
    """`plan` is what came of it. `num_preempted` and `num_stowed` count victims."""

    def __init__(self, parts: Parts) -> None:
        self.num_preempted = 0
        self.num_stowed = 0
        self._config, self._line, self._pool, self._tables, self._forecast, self._pace = parts
        self._budget = self._config.max_batched_tokens
        self._long_budget = self._budget  # of those, what prompts over a whole step may take
        self._counts: dict[Sequence, int] = {}
        self._copies: dict[Sequence, Copy] = {}
        self._closed = False  # to admissions
        self._growth: int | None = None  # of all that run, in blocks; None: to be computed

    def decide(self) -> None:
        """Decodes, then prefills, then the rest of the budget."""
        for sequence in sorted(self._line.running, key=by_priority):
            if sequence.state is State.RUNNING and sequence.remaining == 1:
                self._feed(sequence, 1)
        self._limit_prefills()
        whole = self._config.max_batched_tokens
        targeted = self._config.itl_target_ms and self._long_budget < whole
        if targeted:
            self._budget = self._long_budget
        self._prefills(max(1, (self._budget if targeted else whole) // 2))
        self._deal_rest()

    def plan(self) -> StepPlan | None:
        """None when nobody has anything to compute."""
        if not self._counts:
            return None
        copied, moves_out, moves_in = self._pool.moves()
        return StepPlan(
            rows=tuple(_row(sequence, number) for sequence, number in self._counts.items()),
            copies=(*self._copies.values(), *copied),
            moves_out=moves_out,
            moves_in=moves_in,
        )

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, to be moved back from host memory, or to be computed again."""
        self._spend(sequence, -self._counts.pop(sequence, 0))
        copied = self._copies.pop(sequence, None)
        self._closed = True  # what was freed is for those that run
        self._growth = None
        leaving = self._tables.leaving(sequence)
        if leaving is not None and self._pace.swap_is_cheaper(leaving):
            self._tables.stow(sequence, copied)
            self.num_stowed += 1
        self._tables.release(sequence)
        self._line.stop(sequence)
        self._line.wait(sequence)
        sequence.num_computed = 0
        sequence.wait = Wait.ORDER
        self._forecast.preempted()
        self.num_preempted += 1

    def _limit_prefills(self) -> None:
        decodes, line = len(self._counts), self._line
        wanting = len(line.running) - decodes + min(len(line.waiting), len(line.slots))
        allowed = self._pace.prefill_tokens(decodes, self._budget, wanting)
        if allowed < self._budget:
            self._long_budget = allowed

    def _prefills(self, half: int) -> None:
        prefilling = [sequence for sequence in self._line.running if sequence.remaining > 1]
        candidates = sorted(prefilling + self._line.waiting, key=by_priority)
        most = half if len(candidates) > 1 else max(1, self._budget)
        for sequence in candidates:
            if not self._budget:
                return
            if sequence.state is State.RUNNING:
                self._feed(sequence, most)
            elif self._closed:
                sequence.wait = Wait.ORDER
            else:
                self._admit(sequence, most)

    def _deal_rest(self) -> None:
        for sequence, given in self._counts.items():
            room = self._tables.room(sequence) - given
            more = min(self._left(sequence), sequence.remaining - given, room)
            if more > 0:
                self._give(sequence, more)

    def _left(self, sequence: Sequence) -> int:
        """Tokens that the step has left for it.

        A prompt of over a step would delay the decodes beside it in each of its chunks, so these
        are short; one that a step is enough for delays them once, and decodes all the sooner.
        """
        long_left = max(0, self._long_budget)  # each that is admitted gets a token beyond it
        return min(self._budget, long_left) if self._is_long(sequence) else self._budget

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.is_long and sequence.remaining > 1

    def _spend(self, sequence: Sequence, number: int) -> None:
        self._budget -= number
        if self._is_long(sequence):
            self._long_budget -= number

    def _feed(self, sequence: Sequence, most: int) -> None:
        if not self._left(sequence):
            return
        while (room := self._tables.room(sequence)) < 1:
            last = max(self._line.running, key=by_priority)
            if last is sequence:
                return
            self.preempt(last)
        copy = self._tables.begin(sequence)
        if copy is not None:
            self._copies[sequence] = copy
        self._give(sequence, min(most, self._left(sequence), sequence.remaining, room))

    def _give(self, sequence: Sequence, number: int) -> None:
        given = self._counts.get(sequence, 0) + number
        self._tables.grow(sequence, sequence.num_computed + given)
        self._counts[sequence] = given
        self._spend(sequence, number)

    def _admit(self, sequence: Sequence, most: int) -> None:
        hits = self._tables.match(sequence)
        if self._is_computed_by_another(sequence, len(hits)):
            sequence.wait = Wait.PREFIX
            return
        if not self._fits(sequence, hits):
            if not self._displace(sequence, hits):
                # Everyone behind a missing slot misses it too. Blocks are another matter: a
                # small one may pass a large one, until the large one has waited long enough.
                sequence.wait = Wait.SLOTS if self._line.is_full else Wait.BLOCKS
                self._closed |= sequence.overdue or self._line.is_full
                return
            hits = self._tables.match(sequence)  # host memory may have lost some of them
        self._line.run(sequence)
        self._growth = None
        self._tables.load(sequence, hits)
        # For all of its chunks: the last one delays the decodes beside it as the others do.
        sequence.is_long = sequence.remaining > self._config.max_batched_tokens
        if sequence.cached_tokens is None:
            # What was stowed of it is its own: it read that from nobody.
            cached = len(hits) * self._config.block_tokens
            sequence.cached_tokens = min(cached, sequence.num_prompt)
            sequence.num_counted = sequence.cached_tokens
        room = self._tables.room(sequence)
        self._give(sequence, min(most, max(1, self._left(sequence)), sequence.remaining, room))

    def _is_computed_by_another(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether waiting spares computing its next full block.

        Never for a lower class, which may itself wait for long, and never without end.
        """
        start = num_hits * self._config.block_tokens
        end = start + self._config.block_tokens
        if end > sequence.hits_max or sequence.overdue:
            return False
        return any(
            other.num_computed < end <= other.num_tokens
            and other.rank <= sequence.rank
            and other.root == sequence.root
            and other.tokens[start:end] == sequence.tokens[start:end]
            and other.tokens[:start] == sequence.tokens[:start]
            for other in self._line.running
        )

    def _fits(self, sequence: Sequence, hits: list[Content]) -> bool:
        if self._line.is_full:
            return False
        return not self._line.running or self._missing(sequence, hits) <= 0

    def _missing(self, sequence: Sequence, hits: list[Content]) -> int:
        """Blocks too few for it beside the expected growth of all that run."""
        if self._growth is None:
            self._growth = sum(map(self._forecast.growth, self._line.running))
        spare = self._pool.num_available - self._pool.num_unheld(hits)
        needed = self._forecast.blocks_with_forks(sequence) - len(hits)
        return needed + self._growth + self._forecast.headroom - spare

    def _displace(self, sequence: Sequence, hits: list[Content]) -> bool:
        """Preempt lower classes until it fits, unless that would not be enough."""
        running = self._line.running
        lower = [other for other in running if other.rank > sequence.rank and not other.overdue]
        lower.sort(key=by_priority)
        gain = sum(len(other.blocks) + self._forecast.growth(other) for other in lower)
        if not lower or (len(lower) < len(running) and gain < self._missing(sequence, hits)):
            return False
        while lower and not self._fits(sequence, hits):
            self.preempt(lower.pop())
        return self._fits(sequence, hits)


def _row(sequence: Sequence, number: int) -> Row:
    start = sequence.num_computed
    end = start + number
    if sequence.table is None:
        sequence.table = tuple(sequence.blocks)
    return Row(
        sequence=sequence.number,
        token_ids=tuple(sequence.tokens[start:end]),
        start=start,
        blocks=sequence.table,
        draw=sequence.draw() if end == sequence.num_tokens else None,
        targets=sequence.targets(start, end),
        target_logprobs=sequence.sampling.prompt_logprobs or 0,
    )
