"""Every bound of a pool, in one value that its twin in Lua is compiled with."""

import msgspec

from core.fair_queue import QueueRules
from core.placement import PlacementRules
from core.prefix_index import PrefixRules
from core.shed import ShedRules


class PoolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Gateways that disagree on them decide by their own."""

    lease_ms: int = 5_000  # a gateway silent for so long is gone, and its tickets with it
    ack_ms: int = 1_000
    reannounce_ms: int = 1_000  # of a new epoch, before anything is placed
    reannounce_max_ms: int = 3_000  # while a gateway still owes its tickets
    no_replica_ms: int = 10_000  # a pool without replicas keeps its queue so long
    wait_max_ms: int = 600_000  # in the queue, without a deadline
    grants_max: int = 16  # tickets placed in one call
    skips_max: int = 8  # heads that fit nowhere, passed over in one call
    steps_max: int = 64  # heads looked at in one call
    sweep_max: int = 32  # tickets of silent gateways let go in one call
    listed_max: int = 64  # grants told in one answer
    queue: QueueRules = QueueRules()
    placement: PlacementRules = PlacementRules()
    prefix: PrefixRules = PrefixRules()
    shed: ShedRules = ShedRules()
