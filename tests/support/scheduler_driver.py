"""The real scheduler on the fake runner, whose output is wrong as soon as one block is."""

from tests.support.fake_runner import FakeRunner, expected
from worker.admission import SchedulerConfig, refuse
from worker.blocks import BlockPool
from worker.prefix import sha256
from worker.scheduler import Scheduler


class Driver:
    """Steps a scheduler until its sequences end, and keeps their outputs."""

    def __init__(self, hash_block=None, **config):
        defaults = {"kv_blocks": 16, "context_tokens": 1 << 20, "block_tokens": 4}
        defaults |= {"max_batched_tokens": 16, "max_sequences": 8}
        self.config = SchedulerConfig(**(defaults | config))
        pool = BlockPool(
            self.config.kv_blocks,
            self.config.block_tokens,
            host_blocks=self.config.host_blocks,
            marked_share=self.config.marked_share,
            hash_block=hash_block or sha256,
        )
        self.scheduler = Scheduler(self.config, pool)
        self.runner = FakeRunner(
            self.config.kv_blocks, self.config.block_tokens, host_blocks=self.config.host_blocks
        )
        self.done = []
        self.now_ms = 0

    def add(self, *sequences):
        assert refuse(self.config, sequences, 0) is None
        self.scheduler.add(sequences)
        return sequences[0]

    def step(self):
        """One step. Returns {sequence number: tokens}."""
        plan = self.scheduler.schedule(self.now_ms)
        if plan is None:
            return {}
        assert plan.num_tokens <= self.config.max_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_sequences
        result = self.runner.execute(plan)
        for sequence, _ in self.scheduler.complete(plan, result):
            if sequence.num_tokens == sequence.final_tokens:
                self.scheduler.finish(sequence)
                self.done.append(sequence)
        return {row.sequence: len(row.token_ids) for row in plan.rows}

    def run(self, steps_max=10_000):
        for _ in range(steps_max):
            if not self.scheduler.has_work:
                self.assert_idle()
                return self.done
            assert self.step()
        raise AssertionError("no end in sight")

    def assert_idle(self):
        pool = self.scheduler.pool
        assert self.scheduler.problems() == []
        assert pool.num_in_use == 0
        assert pool.host.num_available == self.config.host_blocks
        assert not self.scheduler._requests
        assert not self.scheduler._numbered


def assert_right_output(sequence):
    prompt = sequence.tokens[: sequence.num_prompt]
    answer = expected(prompt, sequence.sampling, sequence.choice, sequence.num_output)
    assert sequence.tokens[sequence.num_prompt :] == answer


def assert_right_outputs(driver, number):
    assert len(driver.done) == number
    for sequence in driver.done:
        assert_right_output(sequence)
