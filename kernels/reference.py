"""Every kernel once, in plain torch: the specification that the fast ones are tested against.

Written to be read, never to be run by the engine: loops over rows, float32 inside, the
result in the type of the input. Shapes use these letters:

    T  tokens of a step, all sequences packed    H  query heads      G  query heads per KV head
    S  sequences                                 K  KV heads         D  length of a head
    N  blocks in the pool                        B  tokens of a block    V  vocabulary

KV cache of one layer: (N, 2, K, B, D), keys at [:, 0] and values at [:, 1]. Position `p` of a
sequence lives in block `table[p // B]` at offset `p % B`: its slot is `block * B + offset`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store keys and values, each (T, K, D), at `slots` (T,). Writes `cache` in place.

    A slot of -1 is padding and stores nothing. No slot appears twice.
    """
    block_tokens = cache.shape[3]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_tokens)
            cache[block, 0, :, offset] = keys[token]
            cache[block, 1, :, offset] = values[token]


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks within `cache`, in place. All sources are read before any write."""
    cache[destinations] = cache[sources].clone()


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    *,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of packed rows over the paged cache, which already holds their own KV.

    Prefill, chunk and decode are one thing: sequence `s` has the queries
    `query_starts[s] : query_starts[s + 1]`, which are the last positions of its
    `context_lengths[s]`. A query at position `p` sees positions 0 to p and nothing else.
    Query head `h` reads KV head `h // G`.

    Shapes: queries (T, H, D); tables (S, blocks at most); query_starts (S + 1,);
    context_lengths (S,). Returns (T, H, D).
    """
    out = torch.empty_like(queries)
    for index, length in enumerate(context_lengths.tolist()):
        begin, end = query_starts[index : index + 2].tolist()
        keys, values = _gather(cache, tables[index], length)
        position = torch.arange(length - (end - begin), length)
        visible = torch.arange(length) <= position[:, None]
        out[begin:end] = _attend(queries[begin:end], keys, values, visible, scale)
    return out


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, for `x = hidden + residual`.

    Returns that, and `x` itself, which is the next residual. Both of `hidden`'s shape.
    """
    total = hidden if residual is None else hidden + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(hidden.dtype) * weight, total


def rope_tables(
    num_positions: int, head_dim: int, theta: float, factors: tuple[float, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (num_positions, D / 2) float32.

    Pair `i` turns by `theta ** (-2 i / D) / factors[i]` per position (RoFormer, section 3.4).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if factors:
        frequencies = frequencies / torch.tensor(factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of every head.

    Shapes: heads (T, heads, D); cos and sin (T, D / 2), the rows of the tokens' positions.
    """
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gate * sigmoid(gate) * up`, elementwise (SwiGLU)."""
    return (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(gate.dtype)


def sampling_order(logits: Tensor) -> Tensor:
    """Token ids (S, V) from the likeliest down; among equals the lowest id comes first."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices


def constrained_logits(
    logits: Tensor,
    *,
    output_ids: Sequence[int],
    allowed_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
    logit_bias: Sequence[tuple[int, float]] = (),
) -> Tensor:
    """One row's logits (V,) float32 after what its answer so far, `output_ids`, forbids.

    In this order: all but `allowed_ids` (none: all are); the last token of each bad word whose
    others are the answer's end; `end_ids`, while the answer is shorter than `min_tokens`. What
    is forbidden becomes minus infinity, and a bias does not bring it back.
    """
    changed = logits.clone()
    for id_ in range(len(logits)):
        if allowed_ids and id_ not in allowed_ids:
            changed[id_] = -torch.inf
    for word in bad_words:
        begun = list(word[:-1])
        if list(output_ids[len(output_ids) - len(begun) :]) == begun:
            changed[word[-1]] = -torch.inf
    for id_ in end_ids:
        if len(output_ids) < min_tokens:
            changed[id_] = -torch.inf
    for id_, bias in logit_bias:
        changed[id_] += bias
    return changed


def penalised_logits(
    logits: Tensor,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Tensor:
    """One row's logits (V,) float32, where what was said already is less likely.

    Repetition (CTRL, Keskar et al. 2019, section 4.1) divides what is over 0 and multiplies what
    is under, for each token of prompt and output. Frequency is subtracted for each time that
    the output has a token, presence once.
    """
    changed = logits.clone()
    for id_ in {*prompt_ids, *output_ids}:
        count = list(output_ids).count(id_)
        value = changed[id_]
        value = value / torch.tensor(repetition) if value > 0 else value * torch.tensor(repetition)
        value = value - torch.tensor(frequency) * torch.tensor(float(count))
        changed[id_] = value - torch.tensor(presence) * float(count > 0)
    return changed


def filtered_probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """What a row may draw: probabilities (S, V) float64, zero where filtered, each row sums to 1.

    In this order: divide by temperature (> 0); keep what has `min_p` of the likeliest's
    probability (0 is off); keep the `top_k` likeliest (0 is off); of what is left, renormalised,
    keep the fewest likeliest that reach `top_p` together, and at least one. Temperature, top_k,
    top_p and min_p are (S,).
    """
    order = sampling_order(logits)
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature.double()[:, None]
    ordered = torch.softmax(scaled, dim=-1).gather(1, order)
    if min_p is not None:
        ordered[ordered < min_p.double()[:, None] * ordered[:, :1]] = 0.0
    rank = torch.arange(logits.shape[1])
    for row, (k, p) in enumerate(zip(top_k.tolist(), top_p.tolist(), strict=True)):
        if k > 0:
            ordered[row, rank >= k] = 0.0
        ordered[row] /= ordered[row].sum()
        if p < 1.0:
            before = ordered[row].cumsum(0) - ordered[row]
            ordered[row, (before >= p) & (rank > 0)] = 0.0
            ordered[row] /= ordered[row].sum()
    return torch.zeros_like(ordered).scatter_(1, order, ordered)


def draw(probabilities: Tensor, order: Tensor, uniform: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, taken in `order`, at `uniform` (S,) in [0, 1).

    Returns ids (S,). An id of probability zero is never drawn.
    """
    ordered = probabilities.gather(1, order)
    reached = ordered.cumsum(1) > uniform[:, None] * ordered.sum(1, keepdim=True)
    return order.gather(1, reached.int().argmax(1, keepdim=True))[:, 0]


def _gather(cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    block_tokens = cache.shape[3]
    blocks = cache[table[: -(-length // block_tokens)]]  # (blocks, 2, K, B, D)
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values  # each (K, length, D)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    group = queries.shape[1] // keys.shape[0]
    wide = queries.float().transpose(0, 1)  # (H, tokens, D)
    keys = keys.float().repeat_interleave(group, dim=0)
    values = values.float().repeat_interleave(group, dim=0)
    scores = (wide @ keys.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1).to(queries.dtype)
