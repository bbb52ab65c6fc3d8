"""The Llama family: one forward pass over all tokens of a step, packed.

Every linear layer sees the whole step as one matrix of (T, width); only attention knows
where one sequence ends and the next begins, and it was told once, in the step's plan.
Letters as in `kernels.reference`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import FAST, Kernels
from kernels.cpu_attention_plan import AttentionPlan
from kernels.cpu_linear import Gated, Linear
from kernels.cpu_pointwise import rope_rows
from worker.weights import Weights

# Of the best logit: two roundings to bfloat16, of 2^-9 each, on either side.
TIE = 2.0**-7
TIES_MAX = 32  # for each row


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gated: Gated
    down: Linear


class Llama:
    """A Llama ready to run. Takes its tensors out of `weights`, so that none is held twice."""

    def __init__(self, weights: Weights, *, block_tokens: int, kernels: Kernels = FAST) -> None:
        config, tensors = weights.config, weights.tensors
        self.config = config
        self._kernels = kernels
        self._embedding = tensors.pop("model.embed_tokens.weight")
        self.dtype = self._embedding.dtype
        self._norm = tensors.pop("model.norm.weight")
        head = self._embedding if config.tied_head else tensors.pop("lm_head.weight")
        self._head = kernels.linear(head)
        # Of a head that is not the embedding's too, this is a second copy beside the packed one.
        self._head_rows = head if self.dtype == torch.bfloat16 and kernels is FAST else None
        self._layers = [_layer(kernels, tensors, index) for index in range(config.num_layers)]
        assert not tensors, "load_weights lets only a Llama's tensors through"
        self._cos, self._sin = rope_rows(
            config.context_tokens, config.head_dim, config.rope_theta, config.rope_factors
        )
        self.attention = kernels.attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
            dtype=self.dtype,
        )

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        cache: Tensor,
        wanted: Tensor,
    ) -> Tensor:
        """Run a step; return what `logits` makes the `wanted` (S,) of its tokens' of: (S, width).

        Shapes: token_ids and positions (T,); cache (layers, N, 2, K, B, D), written in place.
        """
        config, kernels = self.config, self._kernels
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = functional.embedding(token_ids, self._embedding)
        mixed = hidden.new_empty(len(token_ids), config.num_heads, config.head_dim)
        for layer, layer_cache in zip(self._layers, cache.unbind(), strict=True):
            normed = kernels.rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
            heads = layer.qkv(normed).view(len(token_ids), -1, config.head_dim)
            kernels.rope_in_place(heads[:, : -config.num_kv_heads], cos, sin)
            self.attention.write(plan, layer_cache, heads[:, config.num_heads :])
            self.attention.attend(plan, heads[:, : config.num_heads], layer_cache, mixed)
            if layer is self._layers[-1]:
                # Nobody reads what the last layer makes of the other tokens.
                hidden, mixed = hidden[wanted], mixed[wanted]
            if not len(hidden):
                return hidden
            hidden = layer.attention_out.plus(mixed.flatten(1), hidden)
            normed = kernels.rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
            hidden = layer.down.plus(layer.gated(normed), hidden)
        return kernels.rms_norm(hidden, self._norm, config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """What follows the tokens of `hidden` (S, width): (S, V) float32."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size)
        logits = self._head(hidden).float()
        if self._head_rows is not None:
            settle_ties(logits, hidden, self._head_rows)
        return logits


def settle_ties(logits: Tensor, hidden: Tensor, rows: Tensor) -> None:
    """Compute the likeliest of each row of `logits` (S, V) again in float32, in place.

    A product in bfloat16 is rounded to 8 bits: around 25, to an eighth, where a greedy answer's
    first two tokens are often nearer to each other than that. Those within two such steps of
    the best are multiplied anew, `hidden` (S, width) with `rows` (V, width): a few for each row.
    Where so many are alike that it would cost, their order says nothing anyhow.
    """
    peaks = logits.amax(dim=-1, keepdim=True)
    near = logits >= peaks - peaks.abs() * TIE
    if int(near.sum()) > TIES_MAX * len(logits):
        return
    at, token = near.nonzero(as_tuple=True)
    logits[at, token] = (hidden[at].float() * rows[token].float()).sum(dim=-1)


def _layer(kernels: Kernels, tensors: dict[str, Tensor], index: int) -> _Layer:
    def take(name: str) -> Tensor:
        return tensors.pop(f"model.layers.{index}.{name}.weight")

    return _Layer(
        attention_norm=take("input_layernorm"),
        qkv=kernels.linear(*(take(f"self_attn.{part}_proj") for part in "qkv")),
        attention_out=kernels.linear(take("self_attn.o_proj")),
        mlp_norm=take("post_attention_layernorm"),
        gated=kernels.gated(take("mlp.gate_proj"), take("mlp.up_proj")),
        down=kernels.linear(take("mlp.down_proj")),
    )
