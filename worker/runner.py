"""Executes steps on the model: the shell between plain plans and tensors.

Owns the weights and the KV pool, and knows nothing of requests: which blocks belong to whom
is the plan's business. A step is one forward pass over all its tokens. One thread at a time.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.protocol import Sampling, TokenLogprob
from kernels.cpu import FAST, INVARIANT
from kernels.cpu_attention_plan import Span, packing_order
from kernels.cpu_linear import has_bfloat16
from worker.host_memory import HostMemory
from worker.models.llama import Llama
from worker.sampler import Sampler
from worker.step import Draw, Opening, Row, StepPlan, StepResult
from worker.weights import LlamaConfig, load_weights

# Sequences at once, where whoever loads a runner brings no sampler.
SLOTS = 64
# Positions of prompts that have logits at the same time: the head's, where a step's are many.
TARGETS_AT_ONCE = 64

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARM_DRAW = Draw(
    slot=0,
    index=0,
    opening=Opening(
        choice=0,
        sampling=Sampling(seed=0, max_tokens=1, top_p=0.9),
        prompt_ids=(),
        output_ids=(),
    ),
)


class ModelRunner:
    """A Llama and its KV pool. Implements `worker.step.Runner`."""

    def __init__(
        self,
        model: Llama,
        *,
        kv_blocks: int,
        block_tokens: int,
        host_blocks: int = 0,
        sampler: Sampler | None = None,
    ) -> None:
        config = model.config
        self.config = config
        self.dtype = model.dtype
        self.block_tokens = block_tokens
        self._model = model
        self._sampler = sampler or Sampler(SLOTS)
        self.resize(kv_blocks, host_blocks)

    @property
    def block_bytes(self) -> int:
        """Of one block's keys and values, all layers together."""
        config = self.config
        values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return values * self.block_tokens * self.dtype.itemsize

    def resize(self, kv_blocks: int, host_blocks: int = 0) -> None:
        """Give the pool back and take one of so many blocks, or none. What it held is gone.

        `host_blocks` are beside it, in host memory.
        """
        config = self.config
        self.kv_blocks = kv_blocks
        self._host = HostMemory(host_blocks)
        self._cache = torch.empty(0)  # not both at once
        # Zeroed, so that the pool's memory is taken now and not in the middle of an answer, and
        # because padding needs numbers: a share of zero of what is not finite is not zero.
        shape = (config.num_layers, kv_blocks, 2, config.num_kv_heads, self.block_tokens)
        self._cache = torch.zeros(*shape, config.head_dim, dtype=self.dtype)
        self._host.reserve(self._cache)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """See `worker.step.Runner`."""
        self._host.move(self._cache, plan)
        self._blank(plan.rows)
        spans = [Span(row.start, len(row.token_ids), row.blocks) for row in plan.rows]
        order = packing_order(spans)
        packed = [plan.rows[place] for place in order]
        attention = self._model.attention.plan([spans[place] for place in order])
        # In the plan's order from here on: the last token of each row that draws.
        ends = dict(zip(order, np.cumsum([len(row.token_ids) for row in packed]), strict=True))
        drawing = [(ends[place] - 1, row.draw) for place, row in enumerate(plan.rows) if row.draw]
        telling = [
            (ends[place] - len(row.token_ids), row)
            for place, row in enumerate(plan.rows)
            if row.targets
        ]
        told = [first + at for first, row in telling for at in range(len(row.targets))]
        hidden = self._model.hidden(
            torch.tensor([token for row in packed for token in row.token_ids]),
            _positions(packed),
            attention,
            self._cache,
            torch.tensor([*(end for end, _ in drawing), *told], dtype=torch.int64),
        )
        logits = self._model.logits(hidden[: len(drawing)])
        return StepResult(
            sampled=self._sampler.sample(logits, [draw for _, draw in drawing]),
            targets=self._tell(hidden[len(drawing) :], [row for _, row in telling]),
        )

    def warm_up(self, *, tokens: int) -> None:
        """Run a prefill of `tokens` and a decode after it, over blocks that nobody uses yet.

        The first step starts threads, reads every weight, and has oneDNN compile its loops;
        no caller should wait for that.
        """
        tokens = min(tokens, self.kv_blocks * self.block_tokens - 1, self.config.context_tokens - 1)
        for start, count in ((0, tokens), (tokens, 1)) if tokens else ((0, 1),):
            blocks = tuple(range(-(-(start + count) // self.block_tokens)))
            row = Row(
                sequence=0, token_ids=(0,) * count, start=start, blocks=blocks, draw=_WARM_DRAW
            )
            self.execute(StepPlan(rows=(row,)))

    def _blank(self, rows: Sequence[Row]) -> None:
        """Clear the blocks that a row begins and does not fill.

        Attention reads all of a block and gives what is not written yet a share of zero; were
        it the last owner's, and no number, that would not be nothing.
        """
        begun = []
        for row in rows:
            last = (len(row.blocks) - 1) * self.block_tokens
            if row.start <= last and row.start + len(row.token_ids) < last + self.block_tokens:
                begun.append(row.blocks[-1])
        if begun:
            self._cache[:, begun] = 0

    def _tell(self, hidden: Tensor, rows: Sequence[Row]) -> tuple[tuple[TokenLogprob, ...], ...]:
        """The logprobs of the rows' targets, whose `hidden` come one after another."""
        targets = torch.tensor([id_ for row in rows for id_ in row.targets], dtype=torch.int64)
        counts = [row.target_logprobs for row in rows for _ in row.targets]
        told: list[TokenLogprob] = []
        for at in range(0, len(targets), TARGETS_AT_ONCE):
            piece = slice(at, at + TARGETS_AT_ONCE)
            logits = self._model.logits(hidden[piece])
            told += self._sampler.tell(logits, targets[piece], counts[piece])
        remaining = iter(told)
        return tuple(tuple(itertools.islice(remaining, len(row.targets))) for row in rows)


def load_runner(
    path: Path,
    *,
    block_tokens: int,
    kv_blocks: int = 0,
    kv_memory_bytes: int = 0,
    dtype: str,
    batch_invariant: bool = False,
    sampler: Sampler | None = None,
) -> ModelRunner:
    """A runner for the weights at `path`, a model version's directory or a `.gguf` file.

    The pool has `kv_blocks`, or as many as `kv_memory_bytes` hold where that is 0. `dtype` is
    float32, bfloat16, or auto for the faster one. With `batch_invariant` a sequence's logits are
    the same bits whatever else is in its steps, and steps take longer.

    Raises:
        UnsupportedModelError: weights we cannot run.
        NotInvariantError: a machine that cannot keep that promise.
        ValueError: memory for less than one block, or no such dtype.
    """
    weights = load_weights(path, compute_dtype(dtype))
    fitting = kv_blocks_for_memory(
        weights.config, dtype=dtype, block_tokens=block_tokens, memory_bytes=kv_memory_bytes
    )
    if not (kv_blocks or fitting):
        raise ValueError(f"{kv_memory_bytes} bytes do not hold one block of {block_tokens} tokens")
    kernels = INVARIANT if batch_invariant else FAST
    model = Llama(weights, block_tokens=block_tokens, kernels=kernels)
    return ModelRunner(
        model, kv_blocks=kv_blocks or fitting, block_tokens=block_tokens, sampler=sampler
    )


def compute_dtype(name: str) -> torch.dtype:
    """What `name` means on this machine. Raises ValueError for a name that is none."""
    if name == "auto":
        name = "bfloat16" if has_bfloat16() else "float32"
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def kv_blocks_for_memory(
    config: LlamaConfig, *, dtype: str, block_tokens: int, memory_bytes: int
) -> int:
    """How many blocks of keys and values fit into `memory_bytes`, all layers together."""
    token_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return memory_bytes // (token_values * block_tokens * compute_dtype(dtype).itemsize)


def _positions(packed: Sequence[Row]) -> Tensor:
    spans = [np.arange(row.start, row.start + len(row.token_ids)) for row in packed]
    return torch.from_numpy(np.concatenate(spans))
