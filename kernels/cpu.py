"""The kernels of a processor as sets to choose from: the fast ones, and the invariant ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels import cpu_invariant, cpu_linear, cpu_pointwise
from kernels.cpu_attention import PagedAttention
from kernels.cpu_attention_plan import AttentionPlan, Span


class Attention(Protocol):
    """Attention over one layer's paged cache, by a plan made once a step."""

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """What to read and write for spans that are packed in `packing_order`."""
        ...

    def write(self, plan: AttentionPlan, cache: Tensor, keys_values: Tensor) -> None:
        """Store a layer's new (T, 2 K, D), keys before values. Writes `cache` in place."""
        ...

    def attend(self, plan: AttentionPlan, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        """Fill `out` (T, H, D) for `queries` (T, H, D). The layer's own KV is already written."""
        ...


@dataclass(frozen=True)
class Kernels:
    """One of each kind."""

    linear: Callable[..., cpu_linear.Linear]
    gated: Callable[[Tensor, Tensor], cpu_linear.Gated]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope_in_place: Callable[[Tensor, Tensor, Tensor], None]
    attention: Callable[..., Attention]


FAST = Kernels(
    linear=cpu_linear.linear,
    gated=cpu_linear.gated,
    rms_norm=cpu_pointwise.rms_norm,
    rope_in_place=cpu_pointwise.rope_in_place,
    attention=PagedAttention,
)
INVARIANT = Kernels(
    linear=cpu_invariant.InvariantLinear,
    gated=cpu_invariant.InvariantGated,
    rms_norm=cpu_invariant.rms_norm,
    rope_in_place=cpu_invariant.rope_in_place,
    attention=cpu_invariant.InvariantAttention,
)
