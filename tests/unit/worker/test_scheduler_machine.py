"""Blocks and scheduler through random histories, judged by a model that shares no code with them.

`KVMemory` says what each position holds and compares it with what each row should read;
`PrefixBook` knows what marks promise. Integrity is looked at after every event.
`SOAK_SCHEDULER` is how many histories are tried.
"""

import os
from itertools import count

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.protocol import CacheMark
from tests.support.engine_requests import a_sequence
from tests.support.kv_memory import KVMemory
from tests.support.prefix_book import PrefixBook
from worker.admission import SchedulerConfig, refuse
from worker.blocks import BlockPool
from worker.scheduler import Scheduler
from worker.sequence import TTL_MS, State

HISTORIES = int(os.environ.get("SOAK_SCHEDULER") or 250)
LIVE_MAX = 14


class Histories(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.sampled_from([1, 2, 3, 4, 8]),
        pool_tokens=st.integers(24, 96),
        host_tokens=st.sampled_from([0, 0, 8, 40, 400]),
        chunk=st.integers(1, 24),
        max_sequences=st.integers(1, 6),
        patience_steps=st.sampled_from([0, 3, 30]),
        expected_share=st.sampled_from([0, 0.5, 1]),
        marked_share=st.sampled_from([0, 0.25, 0.5, 1]),
        copy_block_ms=st.sampled_from([1e-6, 0.05, 1e6]),
        colliding=st.booleans(),
    )
    def start(
        self, *, block_tokens, pool_tokens, host_tokens, chunk, max_sequences, colliding, **config
    ):
        self.config = SchedulerConfig(
            block_tokens=block_tokens,
            kv_blocks=-(-pool_tokens // block_tokens),
            host_blocks=host_tokens // block_tokens,
            context_tokens=1 << 20,
            max_batched_tokens=max(chunk, max_sequences),
            max_sequences=max_sequences,
            **config,
        )
        pool = BlockPool(
            self.config.kv_blocks,
            block_tokens,
            host_blocks=self.config.host_blocks,
            marked_share=self.config.marked_share,
            **({"hash_block": lambda message: bytes([sum(message) % 3])} if colliding else {}),
        )
        self.scheduler = Scheduler(self.config, pool)
        self.all = {}
        self.memory = KVMemory(
            self.config.kv_blocks, self.config.host_blocks, block_tokens, self.all.__getitem__
        )
        self.book = PrefixBook(pool)
        self.names = count()
        self.now_ms = 0

    # What comes from outside.

    @precondition(lambda self: len(self.scheduler._numbered) < LIVE_MAX)
    @rule(
        unit=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        repeat=st.integers(1, 4),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        resumed=st.integers(0, 3),
        max_tokens=st.integers(4, 10),
        salt=st.sampled_from([b"a", b"b"]),
        service_class=st.sampled_from(["interactive", "standard", "batch"]),
        marks=st.lists(
            st.builds(CacheMark, tokens=st.integers(1, 30), ttl=st.sampled_from(["5m", "1h"])),
            max_size=3,
        ),
    )
    def add(self, unit, repeat, choices, resumed, **kwargs):
        request = f"request {next(self.names)}"
        sequences = [
            a_sequence(
                (unit * repeat)[:24],
                outputs=[1] * (resumed if choice % 2 == 0 else 0),
                request=request,
                choice=choice,
                **kwargs,
            )
            for choice in range(choices)
        ]
        if refuse(self.config, sequences, 0) is not None:
            return
        self.all.update((sequence.number, sequence) for sequence in sequences)
        self.scheduler.add(sequences)

    @precondition(lambda self: self.scheduler._requests)
    @rule(data=st.data(), in_step=st.booleans())
    def abort(self, data, in_step):
        """Between steps, or while one is computed."""
        request = data.draw(st.sampled_from(sorted(self.scheduler._requests)))
        plan = self._schedule() if in_step else None
        self.scheduler.end(request)
        if plan is not None:
            self._complete(plan)

    @rule(ms=st.sampled_from([1, 1000, TTL_MS["5m"] // 2, TTL_MS["5m"], TTL_MS["1h"]]))
    def time_passes(self, ms):
        self.now_ms += ms

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        running = sorted(self.scheduler.running, key=lambda sequence: sequence.number)
        self.scheduler.preempt(data.draw(st.sampled_from(running)))

    @rule()
    def flush(self):
        self.scheduler.pool.flush()

    # Steps.

    @rule(steps=st.integers(1, 8))
    def run(self, steps):
        for _ in range(steps):
            plan = self._schedule()
            if plan is not None:
                self._complete(plan)
                self.nothing_is_lost()

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def fail_a_step(self):
        plan = self._schedule()
        self.memory.execute(plan)
        self.memory.spoil(plan)
        self.scheduler.failed(plan)
        for request in self.scheduler.requests_in(plan):
            self.scheduler.end(request)

    def _schedule(self):
        scheduler = self.scheduler
        self.book.before_step(self.now_ms, scheduler.running)
        had_work, preempted = scheduler.has_work, scheduler.num_preemptions
        plan = scheduler.schedule(self.now_ms)
        assert (plan is not None) == had_work, "work always advances"
        if scheduler.num_preemptions == preempted:  # or more may be kept in between than after
            self.book.judge_step()
        # What was evicted may be published again by this very step, without its mark.
        self.book.forget_unknown()
        self.book.after_event(scheduler.running)
        if plan is None:
            return None
        assert plan.num_tokens <= self.config.max_batched_tokens
        assert len(scheduler.running) <= self.config.max_sequences
        sizes = [len(row.token_ids) for row in plan.rows]
        assert {row.sequence for row in plan.rows} <= {s.number for s in scheduler.running}
        assert all(sizes)
        return plan

    def _complete(self, plan):
        result = self.memory.execute(plan)
        drawn = self.scheduler.complete(plan, result)
        # A resumed answer may end with the step that publishes its prompt.
        self.book.after_event(self.scheduler.running)
        for sequence, _ in drawn:
            if sequence.num_tokens == sequence.final_tokens:
                self.scheduler.finish(sequence)

    # What must hold.

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, pool = self.scheduler, self.scheduler.pool
        assert scheduler.problems() == []
        self.book.after_event(scheduler.running)
        self.book.forget_unknown()
        held = {block for sequence in scheduler.running for block in sequence.blocks}
        assert pool.num_in_use == len(held)
        assert pool.num_available == self.config.kv_blocks - len(held)
        stowed = [sequence.stowed for sequence in scheduler.waiting if sequence.stowed]
        on_host = {block for each in stowed for block in (*each.blocks, *each.tail)}
        assert pool.host.num_available == self.config.host_blocks - len(on_host)
        alive = {
            sequence.number for sequence in self.all.values() if sequence.state is not State.ENDED
        }
        assert alive == set(scheduler._numbered)

    @invariant()
    def what_can_be_hit_is_what_it_says(self):
        """Every content is in the memory as its chain of parents spells it."""
        if not hasattr(self, "scheduler"):
            return
        pool, size = self.scheduler.pool, self.config.block_tokens
        pending = set(pool._out)
        for content in pool._published._index:
            root, tokens = self.book._prefix(content)
            start = len(tokens) - size
            spelt = [(root, tokens[: start + offset + 1]) for offset in range(size)]
            for block in content.device:
                assert self.memory.device[block] == spelt
            for host_block in set(content.host) - pending:
                assert self.memory.host[host_block] == spelt

    @invariant()
    def usage_adds_up(self):
        if not hasattr(self, "scheduler"):
            return
        size = self.config.block_tokens
        for sequence in self.all.values():
            if sequence.cached_tokens is None:
                continue
            fed = self.memory.fed.get(sequence.number, set())
            written = dict.fromkeys(TTL_MS.values(), 0)
            for start in range(0, sequence.num_prompt - size + 1, size):
                asked = [ttl for ttl, tokens in sequence.marks if start + size <= tokens]
                if asked and start >= sequence.cached_tokens and start + size - 1 in fed:
                    written[max(asked)] += size
            if sequence.choice == 0 and sequence.state is not State.ENDED:
                assert sequence.written_tokens == written
            total = sum(sequence.written_tokens.values()) + sequence.cached_tokens
            assert total <= sequence.num_prompt

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            plan = self._schedule()
            if plan is None:
                break
            self._complete(plan)
        assert not self.scheduler.has_work, "everyone ends"
        self.nothing_is_lost()
        assert self.scheduler.pool.num_in_use == 0
        assert self.scheduler.pool.host.num_available == self.config.host_blocks


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=40,
    # The same ones each time, unless more are asked for: what those find is for a soak to tell.
    derandomize="SOAK_SCHEDULER" not in os.environ,
    database=None,
    # A failure is printed as it was found: to shrink a history takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
