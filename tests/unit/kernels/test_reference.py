"""The specification against independent sources: torch's own operators, and transformers."""

import pytest
import torch
from torch.nn import functional
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels import reference
from worker.weights.config import rope_factors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_attention_of_whole_sequences_is_torchs_causal_attention() -> None:
    torch.manual_seed(1)
    lengths = [1, 7, 20]
    queries = torch.randn(sum(lengths), 6, 8)
    cache = torch.full((9, 2, 2, 4, 8), torch.nan)
    tables = torch.tensor([[8, 0, 0, 0, 0], [3, 1, 0, 0, 0], [2, 7, 0, 5, 4]])
    starts = torch.tensor([0, 1, 8, 28])
    expected = []
    for row, length in enumerate(lengths):
        keys, values = torch.randn(2, length, 2, 8)
        slots = tables[row, torch.arange(length) // 4] * 4 + torch.arange(length) % 4
        reference.write_kv(cache, keys, values, slots)
        own = queries[starts[row] : starts[row + 1]]
        expected.append(
            functional.scaled_dot_product_attention(
                own.transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
                scale=0.3,
            )[0].transpose(0, 1)
        )
    found = reference.paged_attention(
        queries,
        cache,
        tables=tables,
        query_starts=starts,
        context_lengths=torch.tensor(lengths),
        scale=0.3,
    )
    torch.testing.assert_close(found, torch.cat(expected))


def test_attention_of_a_chunk_is_the_tail_of_the_whole() -> None:
    torch.manual_seed(2)
    queries, cache = torch.randn(11, 2, 4), torch.randn(3, 2, 1, 4, 4)
    tables, length = torch.tensor([[2, 0, 1]]), torch.tensor([11])
    whole = reference.paged_attention(
        queries,
        cache,
        tables=tables,
        query_starts=torch.tensor([0, 11]),
        context_lengths=length,
        scale=1.0,
    )
    tail = reference.paged_attention(
        queries[6:],
        cache,
        tables=tables,
        query_starts=torch.tensor([0, 5]),
        context_lengths=length,
        scale=1.0,
    )
    torch.testing.assert_close(tail, whole[6:])


def test_padding_slots_store_nothing() -> None:
    cache = torch.zeros(2, 2, 1, 2, 2)
    reference.write_kv(
        cache, torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0), torch.tensor([-1, 3])
    )
    assert cache[1, 0, 0, 1].tolist() == [1, 1]
    assert cache[1, 1, 0, 1].tolist() == [2, 2]
    assert cache.count_nonzero() == 4


def test_copies_read_every_source_before_they_write() -> None:
    cache = torch.arange(3.0)[:, None, None, None, None].expand(3, 2, 1, 2, 2).clone()
    reference.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache[:, 0, 0, 0, 0].tolist() == [0, 0, 1]


def test_rms_norm_is_torchs_after_the_residual_is_added() -> None:
    hidden, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    normed, total = reference.rms_norm(hidden, weight, 1e-5, residual)
    torch.testing.assert_close(total, hidden + residual)
    torch.testing.assert_close(normed, functional.rms_norm(hidden + residual, (8,), weight, 1e-5))
    torch.testing.assert_close(
        reference.rms_norm(hidden, weight, 1e-5)[0], functional.rms_norm(hidden, (8,), weight, 1e-5)
    )


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3])
def test_rope_is_that_of_transformers(scaling: dict[str, float | str]) -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 500.0, **scaling},
    )
    positions = torch.tensor([0, 1, 5, 1999])
    heads = torch.randn(4, 3, 8)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    whole = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(whole, whole, cos, sin)
    factors = rope_factors(scaling, theta=500.0, head_dim=8)
    cos, sin = reference.rope_tables(2048, 8, 500.0, factors)
    found = reference.rope(heads, cos[positions], sin[positions])
    torch.testing.assert_close(found, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_silu_mul_is_torchs() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(reference.silu_mul(gate, up), functional.silu(gate) * up)


def _filtered(
    logits: list[float], temperature: float = 1.0, k: int = 0, p: float = 1.0
) -> list[float]:
    found = reference.filtered_probabilities(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([k]), torch.tensor([p])
    )
    return [round(share, 4) for share in found[0].tolist()]


LOGITS = [0.0, 2.0, 2.0, 1.0]  # shares 0.0541 0.3995 0.3995 0.1470


def test_without_filters_it_is_the_softmax_at_that_temperature() -> None:
    assert _filtered(LOGITS) == [0.0541, 0.3995, 0.3995, 0.147]
    assert _filtered(LOGITS, temperature=0.5) == [0.0085, 0.4643, 0.4643, 0.0628]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    assert _filtered(LOGITS, k=1) == [0, 1, 0, 0]
    assert _filtered(LOGITS, k=3) == [0, 0.4223, 0.4223, 0.1554]
    assert _filtered(LOGITS, k=99) == _filtered(LOGITS)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert _filtered(LOGITS, p=0.39) == [0, 1, 0, 0]
    assert _filtered(LOGITS, p=0.41) == [0, 0.5, 0.5, 0]
    assert _filtered(LOGITS, p=0.0) == [0, 1, 0, 0]


def test_top_p_is_of_what_top_k_left() -> None:
    # Of the three that are left, the first two have 0.8446 together; of all four, 0.7990.
    assert _filtered(LOGITS, k=3, p=0.82) == [0, 0.5, 0.5, 0]
    assert _filtered(LOGITS, k=0, p=0.82) == [0, 0.4223, 0.4223, 0.1554]


def test_a_draw_inverts_the_distribution_in_its_order() -> None:
    probabilities = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).expand(5, 4)
    order = torch.tensor([[1, 2, 0, 3]]).expand(5, 4)
    chance = torch.tensor([0.0, 0.49, 0.5, 0.75, 0.9999])
    assert reference.draw(probabilities, order, chance).tolist() == [1, 1, 0, 3, 3]


def test_min_p_is_a_share_of_the_likeliest_and_comes_before_the_other_filters() -> None:
    def filtered(min_p: float, p: float = 1.0) -> list[float]:
        found = reference.filtered_probabilities(
            torch.tensor([LOGITS]),
            torch.ones(1),
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([p]),
            torch.tensor([min_p]),
        )
        return [round(share, 4) for share in found[0].tolist()]

    assert filtered(0.36) == [0, 0.4223, 0.4223, 0.1554]  # 0.1470 is 0.37 of 0.3995
    assert filtered(0.37) == [0, 0.5, 0.5, 0]
    assert filtered(0.36, p=0.82) == [0, 0.5, 0.5, 0]


def test_what_is_forbidden_stays_so_whatever_its_bias() -> None:
    def changed(*output_ids: int, **asked) -> list[float]:
        logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return reference.constrained_logits(logits, output_ids=output_ids, **asked).tolist()

    never = -torch.inf
    assert changed() == [1, 2, 3, 4]
    assert changed(allowed_ids=[1, 3], logit_bias=[(0, 100), (1, 2)]) == [never, 4, never, 4]
    assert changed(bad_words=[(2,), (0, 1), (3, 0, 0)]) == [1, 2, never, 4]
    assert changed(3, 0, bad_words=[(2,), (0, 1), (3, 0, 0)]) == [never, never, never, 4]
    assert changed(3, end_ids=[3], min_tokens=2, logit_bias=[(3, 100)]) == [1, 2, 3, never]
    assert changed(3, 3, end_ids=[3], min_tokens=2, logit_bias=[(3, 100)]) == [1, 2, 3, 104]


# transformers' own processors, where they mean the same.
def test_repetition_is_transformers_and_the_others_are_what_openai_says() -> None:
    torch.manual_seed(0)
    logits, prompt, output = torch.randn(30), [1, 2, 3], [3, 7, 7, 7]
    found = reference.penalised_logits(logits, prompt_ids=prompt, output_ids=output, repetition=1.7)
    judge = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    torch.testing.assert_close(found, judge(torch.tensor([prompt + output]), logits[None])[0])
    found = reference.penalised_logits(
        logits, prompt_ids=prompt, output_ids=output, frequency=0.5, presence=0.25
    )
    taken = logits - found
    assert taken.nonzero()[:, 0].tolist() == [3, 7]
    assert taken[[3, 7]].tolist() == pytest.approx([0.75, 1.75])
