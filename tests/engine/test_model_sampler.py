"""The sampler against the specification, and the distribution of its draws."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference
from kernels.philox import uniform
from worker.sampler import AskedDraw, draw_tokens, sample


def a_draw(**changes) -> AskedDraw:
    defaults = {"seed": 7, "choice": 0, "index": 0, "temperature": 1.0}
    return AskedDraw(**(defaults | {"top_p": 1.0, "top_k": 0, "logprobs": None} | changes))


def expected_tokens(logits: torch.Tensor, draws: Sequence[AskedDraw]) -> list[int]:
    probabilities = reference.filtered_probabilities(
        logits,
        torch.tensor([draw.temperature for draw in draws]),
        torch.tensor([draw.top_k for draw in draws]),
        torch.tensor([draw.top_p for draw in draws], dtype=torch.float64),
    )
    words = torch.tensor([(draw.seed, draw.choice, draw.index) for draw in draws])
    chance = uniform(*words.unbind(1))
    return reference.draw(probabilities, reference.sampling_order(logits), chance).tolist()


A_DRAW = st.builds(
    a_draw,
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 8),
    index=st.integers(0, 5000),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
)


@given(
    draws=st.lists(A_DRAW, min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    # Coarse logits have many ties, as bfloat16's do.
    steps=st.sampled_from([1, 2, 1000]),
    candidates=st.sampled_from([(1,), (4,), (4, 16), (200,)]),
)
def test_draws_are_those_of_the_specification_however_few_are_sorted(
    draws: list[AskedDraw], seed: int, steps: int, candidates: tuple[int, ...]
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(len(draws), 60) * 2 * steps).round() / steps
    assert draw_tokens(logits, draws, candidates).tolist() == expected_tokens(logits, draws)


def test_rows_of_a_real_vocabulary() -> None:
    torch.manual_seed(3)
    logits = (torch.randn(6, 49_152) * 3).bfloat16().float()
    draws = [a_draw(seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(6)]
    assert draw_tokens(logits, draws).tolist() == expected_tokens(logits, draws)


def test_greedy_takes_the_likeliest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 5.0, 5.0]])
    found = sample(logits, [a_draw(temperature=0.0)] * 2)
    assert [one.token_id for one in found] == [1, 0]


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(50, 30)
    draws = [a_draw(seed=seed, temperature=1e-45) for seed in range(50)]
    assert draw_tokens(logits, draws).tolist() == logits.argmax(-1).tolist()


def test_a_draw_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(4)
    logits = torch.randn(24, 700) * 2
    draws = [
        a_draw(seed=row, temperature=row % 3 * 0.7, top_k=row % 5 * 20, top_p=1.0 - row % 4 * 0.1)
        for row in range(24)
    ]
    together = [one.token_id for one in sample(logits, draws)]
    alone = [sample(logits[row][None], [draws[row]])[0].token_id for row in range(24)]
    backwards = [one.token_id for one in sample(logits.flip(0), draws[::-1])][::-1]
    assert together == alone == backwards


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (5, 1.0, 0.8), (0, 0.8, 1.3), (6, 0.9, 1.0)]
)
def test_twenty_thousand_draws_follow_the_distribution(
    top_k: int, top_p: float, temperature: float
) -> None:
    torch.manual_seed(5)
    count, logits = 20_000, torch.randn(1, 12)
    draws = [
        a_draw(seed=42, index=index, top_k=top_k, top_p=top_p, temperature=temperature)
        for index in range(count)
    ]
    found = torch.bincount(draw_tokens(logits.expand(count, -1), draws), minlength=12)
    shares = reference.filtered_probabilities(
        logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    )[0]
    assert found[shares == 0].sum() == 0
    expected = shares[shares > 0] * count
    chi_square = ((found[shares > 0] - expected).square() / expected).sum()
    # With 11 degrees of freedom, over 40 happens four times in a hundred thousand.
    assert chi_square < 40


def test_logprobs_are_raw_and_hold_the_chosen_token() -> None:
    torch.manual_seed(6)
    logits = torch.randn(3, 50)
    draws = [
        a_draw(temperature=0.3, top_k=3, logprobs=4),
        a_draw(),
        a_draw(temperature=0.0, logprobs=0),
    ]
    found = sample(logits, draws)
    raw = torch.log_softmax(logits, dim=-1)
    assert found[1].logprob is None
    first, last = found[0].logprob, found[2].logprob
    assert first is not None
    assert last is not None
    assert first.id == found[0].token_id
    assert first.logprob == pytest.approx(raw[0, first.id].item())
    top = torch.topk(raw[0], 4)
    assert [id_ for id_, _ in first.top] == top.indices.tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(top.values.tolist())
    assert last.id == logits[2].argmax()
    assert last.top == ()


def test_equals_among_the_likeliest_are_told_lowest_id_first() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 500] = 1.0
    told = sample(logits, [a_draw(temperature=0.0, logprobs=1)])[0].logprob
    assert told is not None
    assert [id_ for id_, _ in told.top] == [500]
    logits[0, [30, 20, 10]] = 1.0
    told = sample(logits, [a_draw(temperature=0.0, logprobs=3)])[0].logprob
    assert told is not None
    assert [id_ for id_, _ in told.top] == [10, 20, 30]


def test_more_logprobs_than_the_vocabulary_are_all_of_it() -> None:
    told = sample(torch.randn(1, 9), [a_draw(temperature=0.0, logprobs=20)])[0].logprob
    assert told is not None
    assert len(told.top) == 9
