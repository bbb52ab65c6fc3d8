"""The invariants can fail: each bug planted here is found, named, and replayed by its seed."""

import msgspec
import pytest

from core.accounts import EntryKind
from core.dispatch import Pool
from core.ledger import Book
from core.metering import LedgerRefused
from simulator.config import WorldConfig
from simulator.faults import Fault
from simulator.report import SimulationError
from simulator.world import World
from worker.blocks import BlockPool

SEEDS = range(10)


class ForgetsToRelease(Pool):
    """A ticket leaves, and its account stays."""

    def _release(self, ticket):
        ticket.number = 0


class ForgetsCancelled(Pool):
    """A cancelled ticket is never let go of."""

    def cancel(self, ticket, now_ms):
        self._begin(now_ms)


class NeverTakesFromTheQueue(Pool):
    """What could not be placed at once waits for ever."""

    def _dispatch(self, own):
        pass


class SettlesTwice(Book):
    """The same word again is a second bill."""

    def settle(self, word):
        answer = super().settle(word)
        if not isinstance(answer, LedgerRefused) and answer.billed_micro:
            row = self.rows[word.request_id]
            self._post(row, EntryKind.SETTLE, posted_micro=answer.billed_micro)
        return answer


class KeepsReservations(Book):
    """The sweeper's word ends the request and frees nothing."""

    def expire(self, word):
        row = self.rows[word.request_id]
        answer = super().expire(word)
        self._post(row, EntryKind.RESERVE, reserved=row.reserved_micro)
        return answer


class LastWordWins(Book):
    """A witness's totals replace what is known, instead of adding to it."""

    def settle(self, word):
        for said in word.attempts:
            self._forget(word.request_id, said.attempt)
        return super().settle(word)

    def reconcile(self, witness):
        self._forget(witness.request_id, witness.attempt)
        return super().reconcile(witness)

    def _forget(self, request_id, attempt):
        for key in [key for key in self.heard if key[:2] == (request_id, attempt)]:
            del self.heard[key]


class ForgetsTheCap(Book):
    """Hard caps are not looked at."""

    def reserve(self, asked):
        account = self.accounts[asked.tenant_id]
        self.accounts[asked.tenant_id] = msgspec.structs.replace(account, hard_cap_micro=None)
        answer = super().reserve(asked)
        after = self.accounts[asked.tenant_id]
        self.accounts[asked.tenant_id] = msgspec.structs.replace(
            after, hard_cap_micro=account.hard_cap_micro
        )
        return answer


class SharesAcrossTenants(BlockPool):
    """Any tenant's prefix is every tenant's."""

    def chain(self, root, tokens):
        return super().chain(b"", tokens)


class Leaks(BlockPool):
    """The last block of a table is not given back."""

    def release(self, blocks):
        super().release(blocks[:-1])


class WritesSharedBlocks(BlockPool):
    """Choices of one request write into the block they share."""

    def is_shared(self, block):
        return False


class KeepsStaleContent(BlockPool):
    """A block that is written again keeps its published content."""

    def take(self, count):
        blocks = []
        for _ in range(count):
            block, content = self.device.take()
            self.device.contents[block] = content
            blocks.append(block)
        return blocks


DISPATCH = [ForgetsToRelease, ForgetsCancelled, NeverTakesFromTheQueue]
LEDGER = [SettlesTwice, KeepsReservations, LastWordWins, ForgetsTheCap]
BLOCKS = [SharesAcrossTenants, Leaks, WritesSharedBlocks, KeepsStaleContent]


def run(seed, bug, faults):
    field = {"Pool": "pool_type", "Book": "book_type", "BlockPool": "block_pool_type"}
    planted = {field[bug.__mro__[1].__name__]: bug}
    return World(WorldConfig(seed=seed, faults=faults, orders=60, **planted)).run()


def found(bug, faults=()):
    """The first seed that finds it, and what it says."""
    for seed in SEEDS:
        try:
            run(seed, bug, faults)
        except SimulationError as error:
            return seed, str(error)
    pytest.fail(f"no seed finds that {bug.__name__}")


@pytest.mark.parametrize("bug", [*DISPATCH, *BLOCKS, SettlesTwice, ForgetsTheCap])
def test_a_planted_bug_is_found_without_faults(bug):
    seed, message = found(bug)
    assert message.startswith(f"seed {seed}: ")
    assert f"--seed {seed} " in message
    assert "last events" in message


@pytest.mark.parametrize(
    ("bug", "fault"), [(KeepsReservations, Fault.GATEWAY), (LastWordWins, Fault.CUT)]
)
def test_a_bug_that_only_shows_under_a_fault_is_found_under_it(bug, fault):
    seed, message = found(bug, (fault,))
    assert f"--faults {fault}" in message
    with pytest.raises(SimulationError) as again:
        run(seed, bug, (fault,))
    assert str(again.value) == message
