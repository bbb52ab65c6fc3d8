"""What the engine tells about one attempt: the protocol's own frames, in its order.

    submit ─► Nack                                   refused at once: nothing follows
    emit   ─► Started Prompted* Tokens* (Finished | Failed)
              Finished(aborted, expired) | Failed    ended before its first step

`Finished.journal_seq` is 0: the server stamps it once its journal holds the end.
"""

from collections.abc import Callable, Sequence

import msgspec

from core.protocol import Failed, Finished, Prompted, Started, Tokens

Event = Started | Prompted | Tokens | Finished | Failed
Emit = Callable[[Sequence[Event]], None]


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An absolute report. Totals are of this engine's life."""

    kv_blocks_total: int
    kv_blocks_free: int  # free or cached, less what accepted requests that wait will take
    kv_blocks_in_use: int  # 0 at idle
    kv_blocks_cached: int
    running: int  # sequences: each choice of a request is one
    waiting: int
    steps: int  # done, failed ones included
    computed_tokens: int
    output_tokens: int
    preemptions: int
    swaps: int = 0  # of those, the ones whose KV went to host memory
    host_blocks_total: int = 0
    host_blocks_in_use: int = 0
    host_blocks_cached: int = 0
    failed_steps: int
    integrity: bool  # no check so far has found a leak or a wrong count
    healthy: bool  # the last steps did not all fail
    draining: bool
