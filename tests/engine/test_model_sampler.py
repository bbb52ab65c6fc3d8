"""The sampler against the specification, and the distribution of its draws."""

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Sampling
from kernels import reference
from tests.support.sampler_specification import (
    EOS_IDS,
    a_sampling,
    opening_draw,
    specified_token,
)
from worker.sampler import Sampler
from worker.sampler_draws import Asked, draw_tokens
from worker.step import Draw, Sampled

VOCAB = 40
IDS = st.integers(0, VOCAB - 1)

A_SAMPLING = st.builds(
    a_sampling,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.3, 1.0]),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, 0.5, 100.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_ids=st.one_of(st.just(()), st.frozensets(IDS, min_size=1, max_size=6).map(tuple)),
    bad_words=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    stop_ids=st.lists(IDS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


def coarse_logits(rows: int, steps: int, vocab: int = VOCAB) -> torch.Tensor:
    """Many ties, as bfloat16's have, and some tokens that are never drawn."""
    logits = (torch.randn(rows, vocab) * 2 * steps).round() / steps
    return logits.masked_fill_(torch.rand(rows, vocab) < 0.1, -torch.inf)


def tokens_of(sampled: Sequence[Sampled]) -> list[int | None]:
    return [None if one.fault else one.token_id for one in sampled]


@given(
    samplings=st.lists(A_SAMPLING, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    steps=st.sampled_from([1, 2, 1000]),
    data=st.data(),
)
def test_tokens_are_those_of_the_specification_whatever_was_asked_and_whoever_runs_beside(
    samplings: list[Sampling], seed: int, steps: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    sampler = Sampler(len(samplings), eos_ids=EOS_IDS)
    prompt = data.draw(st.lists(st.integers(0, 6), max_size=5))
    outputs: list[list[int]] = [data.draw(st.lists(IDS, max_size=3)) for _ in samplings]
    slots = data.draw(st.permutations(range(len(samplings))))
    opened: set[int] = set()
    for _ in range(6):
        rows = data.draw(st.lists(st.sampled_from(range(len(samplings))), min_size=1, unique=True))
        # Few likely tokens, so that answers repeat themselves.
        logits = coarse_logits(len(rows), steps)
        draws, expected = [], []
        for row, who in enumerate(rows):
            # Some are told of again, as after a preemption.
            opens = who not in opened or data.draw(st.booleans())
            opened.add(who)
            draw = opening_draw(
                samplings[who], slot=slots[who], choice=who, prompt=prompt, output=outputs[who]
            )
            draws.append(draw if opens else Draw(slot=draw.slot, index=draw.index))
            expected.append(
                specified_token(
                    logits[row], samplings[who], choice=who, prompt=prompt, output=outputs[who]
                )
            )
        found = sampler.sample(logits.clone(), draws)
        assert tokens_of(found) == expected
        for who, one in zip(rows, found, strict=True):
            if one.fault:
                assert one.unanswerable
                opened.discard(who)  # its owner ends here
            else:
                outputs[who].append(one.token_id)


A_DRAW = st.builds(
    a_sampling,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


def asked_of(samplings: Sequence[Sampling], indexes: Sequence[int]) -> Asked:
    return Asked(
        temperature=torch.tensor([one.temperature for one in samplings]),
        top_p=torch.tensor([one.top_p for one in samplings], dtype=torch.float64),
        top_k=torch.tensor([one.top_k for one in samplings]),
        min_p=torch.tensor([one.min_p for one in samplings]),
        seed=torch.tensor([one.seed for one in samplings]),
        choice=torch.zeros(len(samplings), dtype=torch.int64),
        index=torch.tensor(indexes),
    )


@given(
    draws=st.lists(A_DRAW, min_size=1, max_size=12),
    index=st.integers(0, 5000),
    seed=st.integers(0, 1000),
    steps=st.sampled_from([1, 2, 1000]),
    candidates=st.sampled_from([(1,), (4,), (4, 16), (200,)]),
)
def test_draws_are_those_of_the_specification_however_few_are_sorted(
    draws: list[Sampling], index: int, seed: int, steps: int, candidates: tuple[int, ...]
) -> None:
    torch.manual_seed(seed)
    logits = coarse_logits(len(draws), steps, 60)
    asked = asked_of(draws, [index] * len(draws))
    expected = [
        specified_token(row, one, output=[1] * index)
        for row, one in zip(logits, draws, strict=True)
    ]
    assert draw_tokens(logits, logits.amax(-1), asked, candidates).tolist() == expected


def test_rows_of_a_real_vocabulary() -> None:
    torch.manual_seed(3)
    logits = (torch.randn(6, 49_152) * 3).bfloat16().float()
    draws = [a_sampling(seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(6)]
    expected = [specified_token(row, one) for row, one in zip(logits, draws, strict=True)]
    found = Sampler(6).sample(logits, [opening_draw(d, slot=s) for s, d in enumerate(draws)])
    assert tokens_of(found) == expected


def test_greedy_takes_the_likeliest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 5.0, 5.0]])
    draws = [opening_draw(a_sampling(temperature=0.0), slot=slot) for slot in range(2)]
    assert tokens_of(Sampler(2).sample(logits, draws)) == [1, 0]


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(50, 30)
    draws = [opening_draw(a_sampling(seed=s, temperature=1e-45), slot=s) for s in range(50)]
    assert tokens_of(Sampler(50).sample(logits, draws)) == logits.argmax(-1).tolist()


def test_a_draw_does_not_depend_on_the_batch_or_on_its_slot() -> None:
    torch.manual_seed(4)
    logits = torch.randn(24, 700) * 2
    samplings = [
        a_sampling(
            seed=row,
            temperature=row % 3 * 0.7,
            top_k=row % 5 * 20,
            top_p=1.0 - row % 4 * 0.1,
            frequency_penalty=row % 2,
            logit_bias=((row, 3.0),) if row % 3 else (),
            min_tokens=row % 4 * 3,
        )
        for row in range(24)
    ]
    output = [5, 5, 9]

    def drawn(order: Sequence[int]) -> list[int | None]:
        draws = [
            opening_draw(samplings[row], slot=slot, output=output) for slot, row in enumerate(order)
        ]
        return tokens_of(Sampler(24, eos_ids=[9]).sample(logits[list(order)], draws))

    together = drawn(range(24))
    assert together == [drawn([row])[0] for row in range(24)]
    assert together == drawn(range(23, -1, -1))[::-1]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 5, "temperature": 0.8},
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 6, "top_p": 0.9},
        {"min_p": 0.2},
    ],
)
def test_twenty_thousand_draws_follow_the_distribution(asked: dict[str, float]) -> None:
    torch.manual_seed(5)
    count, logits, one = 20_000, torch.randn(1, 12), a_sampling(seed=42, **asked)
    found = torch.bincount(
        draw_tokens(
            logits.expand(count, -1),
            logits.amax(-1).expand(count),
            asked_of([one] * count, range(count)),
        ),
        minlength=12,
    )
    shares = reference.filtered_probabilities(
        logits,
        torch.tensor([one.temperature]),
        torch.tensor([one.top_k]),
        torch.tensor([one.top_p]),
        torch.tensor([one.min_p]),
    )[0]
    assert found[shares == 0].sum() == 0
    expected = shares[shares > 0] * count
    chi_square = ((found[shares > 0] - expected).square() / expected).sum()
    # With 11 degrees of freedom, over 40 happens four times in a hundred thousand.
    assert chi_square < 40


def test_choices_of_one_seed_draw_differently_and_always_the_same() -> None:
    logits, sampling = torch.zeros(1, 500), a_sampling(seed=9)
    drawn = [
        tokens_of(Sampler(1).sample(logits.clone(), [opening_draw(sampling, choice=choice)]))[0]
        for choice in (0, 1, 2, 0, 1, 2)
    ]
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_a_slot_forgets_what_its_owner_before_had_asked_for() -> None:
    sampler, logits = Sampler(1, eos_ids=EOS_IDS), torch.arange(5.0)[None]
    everything = a_sampling(
        temperature=0.0, allowed_ids=(1,), logit_bias=((1, 9.0),), presence_penalty=2.0
    )
    plain = a_sampling(temperature=0.0)
    assert tokens_of(sampler.sample(logits.clone(), [opening_draw(everything)])) == [1]
    assert tokens_of(sampler.sample(logits.clone(), [opening_draw(plain)])) == [4]
    assert tokens_of(sampler.sample(logits.clone(), [Draw(slot=0, index=1)])) == [4]


def test_a_step_without_draws_is_no_step() -> None:
    assert Sampler(1).sample(torch.empty(0, 9), []) == ()


def test_ids_beyond_the_vocabulary_are_no_tokens() -> None:
    # Models pad their embedding: a token of it would have no text.
    sampler = Sampler(2, vocab_size=3)
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]] * 2)
    greedy = a_sampling(temperature=0.0, logprobs=4)
    draws = [opening_draw(greedy), opening_draw(a_sampling(top_k=1), slot=1)]
    found = sampler.sample(logits, draws)
    assert tokens_of(found) == [2, 2]
    assert found[0].logprob is not None
    assert sum(torch.tensor([one for _, one in found[0].logprob.top]).exp()) == pytest.approx(1)


def test_a_long_answer_keeps_all_it_has_said() -> None:
    sampling = a_sampling(temperature=0.0, repetition_penalty=2.0)
    sampler, said = Sampler(2), []
    first = msgspec.structs.replace(sampling, repetition_penalty=1.5)
    for index in range(700):
        logits = torch.full((2, 700), 1.0)
        draws = [
            opening_draw(one, slot=slot) if index == 0 else Draw(slot=slot, index=index)
            for slot, one in enumerate((sampling, first))
        ]
        said.append(tokens_of(sampler.sample(logits, draws)))
    assert said == [[index, index] for index in range(700)]
