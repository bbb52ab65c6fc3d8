"""Masks of grammars on logits: the bits, and the fake that other tests draw with."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Grammar, Sampling
from tests.support.fake_masks import FakeMasks
from worker.sampler_masks import ROWS_AT_ONCE, apply_masks, words_of
from worker.step import Opening


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
