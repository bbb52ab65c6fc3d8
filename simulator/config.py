"""Everything a run depends on, and what of it the seed decides."""

from random import Random

import msgspec

from core.dispatch import Pool
from core.ledger import Book
from simulator.bank import BookType
from simulator.dispatcher import PoolType
from simulator.engine import BlockPoolType
from simulator.faults import Fault
from worker.admission import SchedulerConfig
from worker.blocks import BlockPool

CONTEXT_TOKENS = 96
# Workers say that they have so many times their KV blocks: with more they decline and preempt.
BOASTS = (1.0, 1.0, 1.5, 3.0)


class WorldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The types are for tests that plant a bug."""

    seed: int
    faults: tuple[Fault, ...] = ()
    orders: int = 80
    gateways: int = 2
    workers: int = 2
    events_max: int = 0  # cut short after so many; 0 is to rest
    pool_type: PoolType = Pool
    book_type: BookType = Book
    block_pool_type: BlockPoolType = BlockPool
    engine: SchedulerConfig | None = None  # None: the seed decides


class Seeded:
    """Dice of one seed: a stream for each purpose, so that a change in one moves no other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def stream(self, name: str) -> Random:
        """Always the same for the same name."""
        return Random(f"{self._seed} {name}")  # noqa: S311 -- a simulation, not a secret


def engine_config(dice: Random) -> SchedulerConfig:
    """Small enough that blocks, slots and tokens all run short."""
    block_tokens = dice.choice((2, 4, 8))
    whole = CONTEXT_TOKENS // block_tokens
    return SchedulerConfig(
        kv_blocks=dice.randint(whole, 3 * whole),
        context_tokens=CONTEXT_TOKENS,
        block_tokens=block_tokens,
        max_batched_tokens=dice.choice((8, 16, 64)),
        max_sequences=dice.randint(3, 8),
        host_blocks=dice.choice((0, 0, whole // 4, whole)),
    )
