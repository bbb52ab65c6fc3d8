"""Masks of grammars on logits: the bits, and the fake that other tests draw with."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Grammar, Sampling
from tests.support.fake_masks import FakeMasks
from worker.sampler import NO_GRAMMARS, NO_NUMBERS, NOTHING_LEFT, Sampler
from worker.sampler_masks import ROWS_AT_ONCE, MaskError, apply_masks, words_of
from worker.step import Draw, Opening, Sampled


def an_opening(grammar: str | None, output_ids: tuple[int, ...] = ()) -> Opening:
    asked = None if grammar is None else Grammar(kind="regex", text=grammar)
    sampling = Sampling(seed=0, max_tokens=9, grammar=asked)
    return Opening(choice=0, sampling=sampling, prompt_ids=(1,), output_ids=output_ids)


@given(vocab=st.integers(1, 100), data=st.data())
def test_what_a_mask_forbids_is_minus_infinity_and_nothing_else_changes(vocab, data) -> None:
    allowed = data.draw(st.lists(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
    rows = data.draw(st.permutations(range(len(allowed) + 2)))[: len(allowed)]
    logits = torch.randn(len(allowed) + 2, vocab)
    bits = torch.tensor(
        [[_word(row[at : at + 32]) for at in range(0, vocab, 32)] for row in allowed],
        dtype=torch.int32,
    ).reshape(len(allowed), words_of(vocab))
    expected = logits.clone()
    for row, kept in zip(rows, allowed, strict=True):
        expected[row, ~torch.tensor(kept)] = -torch.inf
    apply_masks(logits, torch.tensor(rows, dtype=torch.int64), bits)
    assert torch.equal(logits, expected)


def _word(kept: list[bool]) -> int:
    value = sum(bit << at for at, bit in enumerate(kept))
    return value - (1 << 32) if value >= 1 << 31 else value


def test_a_fill_speaks_of_the_slots_with_a_grammar() -> None:
    masks = FakeMasks(40, [0])
    for slot, grammar in enumerate((None, "3 5|39", "what", "7")):
        masks.open(slot, an_opening(grammar))
    assert masks.fill([0]) is None
    filled = masks.fill([3, 0, 2, 1])
    assert filled is not None
    assert filled.places == (0, 3)
    assert [place for place, _ in filled.faults] == [2]
    logits = torch.zeros(4, 40)
    apply_masks(logits, torch.tensor(filled.places), filled.bits)
    assert logits[3].argmax() == 3
    assert not masks.accept(1, 3)
    masks.open(1, an_opening("3 5|39", (3,)))
    assert masks.accept(1, 39)


def test_more_rows_than_are_unpacked_at_once_are_masked_all() -> None:
    count = 2 * ROWS_AT_ONCE + 3
    bits = torch.ones(count, 2, dtype=torch.int32) << torch.arange(count)[:, None].int() % 32
    logits = torch.zeros(count, 64)
    apply_masks(logits, torch.arange(count), bits)
    for row, left in enumerate(torch.isfinite(logits)):
        assert left.nonzero()[:, 0].tolist() == [row % 32, 32 + row % 32]


EOS = 0


def sampled(
    sampler: Sampler, draws: list[Draw], logits: torch.Tensor | None = None
) -> tuple[Sampled, ...]:
    logits = torch.arange(40.0).repeat(len(draws), 1) if logits is None else logits
    return sampler.sample(logits, draws)


def opened(slot: int, grammar: str | None, output_ids: tuple[int, ...] = (), **asked) -> Draw:
    sampling = Sampling(
        seed=0,
        max_tokens=99,
        **({"temperature": 0.0} | asked),
        grammar=None if grammar is None else Grammar(kind="regex", text=grammar),
    )
    opening = Opening(choice=0, sampling=sampling, prompt_ids=(1,), output_ids=output_ids)
    return Draw(slot=slot, index=len(output_ids), opening=opening)


def a_sampler(slots: int = 4) -> Sampler:
    return Sampler(slots, eos_ids=[EOS], masks=FakeMasks(40, [EOS]))


def test_a_grammar_holds_its_own_row_and_says_when_it_is_complete() -> None:
    sampler = a_sampler()
    found = sampled(sampler, [opened(2, None), opened(0, "3|7 5"), opened(1, "6", temperature=1.0)])
    assert [(one.token_id, one.ends) for one in found] == [(39, False), (7, False), (6, True)]
    found = sampled(sampler, [Draw(slot=0, index=1), Draw(slot=2, index=1)])
    assert [(one.token_id, one.ends) for one in found] == [(5, True), (39, False)]


def test_a_grammar_goes_on_where_a_preempted_answer_was() -> None:
    sampler = a_sampler()
    sampled(sampler, [opened(0, "3 5 9")])
    [found] = sampled(sampler, [opened(1, "3 5 9", (3,))])
    assert found.token_id == 5


def test_bias_and_bans_choose_among_what_the_grammar_allows() -> None:
    asked = {"logit_bias": ((3, 100.0), (30, 100.0)), "bad_words": ((9,),)}
    assert sampled(a_sampler(), [opened(0, "3|4|9", **asked)])[0].token_id == 3


# vllm PR 47489: a grammar at its end and min_tokens masked every token, and then nothing ended.
def test_a_grammar_complete_before_min_tokens_fails_its_request_with_the_reason() -> None:
    sampler = a_sampler()
    draws = [opened(0, "3 5", min_tokens=50), opened(1, "3 5")]
    assert [one.fault for one in sampled(sampler, draws)] == ["", ""]
    first, second = sampled(sampler, [Draw(slot=0, index=1), Draw(slot=1, index=1)])
    assert first.unanswerable
    assert first.fault == "the grammar is complete after 2 tokens, and min_tokens is 50"
    assert (second.token_id, second.ends) == (5, True)


def test_a_grammar_that_allows_only_an_end_too_early_leaves_nothing() -> None:
    sampler = a_sampler()
    [found] = sampled(sampler, [opened(0, "", min_tokens=1)])
    assert (found.fault, found.unanswerable) == (NOTHING_LEFT, True)


def test_a_grammar_that_cannot_be_opened_is_its_own_slots_fault() -> None:
    first, second = sampled(a_sampler(), [opened(0, "what"), opened(1, None)])
    assert first.unanswerable
    assert "no grammar" in first.fault
    assert second.token_id == 39


# vllm #18783: a grammar that did not take its token aborted the engine.
def test_a_token_that_a_grammar_does_not_take_is_its_own_slots_fault() -> None:
    class Refusing(FakeMasks):
        def accept(self, slot: int, token_id: int) -> bool:
            raise MaskError("not this one")

    sampler = Sampler(2, masks=Refusing(40, [EOS]))
    first, second = sampled(sampler, [opened(0, "3"), opened(1, None)])
    assert (first.fault, first.unanswerable) == ("not this one", False)
    assert second.token_id == 39


def test_without_masks_a_grammar_is_refused_and_nobody_else() -> None:
    first, second = sampled(Sampler(2), [opened(0, "3"), opened(1, None)])
    assert (first.fault, first.unanswerable) == (NO_GRAMMARS, True)
    assert second.token_id == 39


def test_no_numbers_in_a_row_with_a_grammar_are_told_as_such() -> None:
    logits = torch.arange(40.0).repeat(2, 1)
    logits[0, 9] = torch.nan
    first, second = sampled(a_sampler(), [opened(0, "3"), opened(1, "3")], logits)
    assert (first.fault, first.unanswerable) == (NO_NUMBERS, False)
    assert second.token_id == 3


def test_logprobs_beside_a_grammar_are_raw() -> None:
    [found] = sampled(a_sampler(), [opened(0, "3", logprobs=1)])
    told = found.logprob
    assert told is not None
    raw = torch.log_softmax(torch.arange(40.0), dim=0)
    assert (told.id, [id_ for id_, _ in told.top]) == (3, [39])
    assert told.logprob == raw[3].item()
