"""Logits that bfloat16 cannot tell apart are told apart."""

import torch

from worker.models.llama import settle_ties


def test_the_likeliest_token_is_the_one_of_the_exact_product():
    dice = torch.Generator().manual_seed(7)
    rows = torch.randn(5_000, 64, generator=dice).bfloat16()
    # Neighbours that differ in the last bits of one number alone.
    rows[1::2] = rows[::2]
    rows[1::2, 0] *= 1 + 2.0**-7
    hidden = (2 * torch.randn(40, 64, generator=dice)).bfloat16()
    exact = hidden.float() @ rows.float().T
    logits = (hidden @ rows.T).float()
    before = (logits.argmax(-1) == exact.argmax(-1)).sum()
    settle_ties(logits, hidden, rows)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert before < len(hidden), "or the case shows nothing"
    assert (logits - exact).abs().max() < 0.5


def test_where_all_are_alike_nothing_is_gathered():
    rows, hidden = torch.ones(1_000, 8).bfloat16(), torch.ones(2, 8).bfloat16()
    logits = torch.full((2, 1_000), 3.0)
    settle_ties(logits, hidden, rows)
    assert torch.equal(logits, torch.full((2, 1_000), 3.0))


def test_numbers_that_are_none_stay_so():
    rows, hidden = torch.ones(8, 8).bfloat16(), torch.ones(2, 8).bfloat16()
    logits = torch.full((2, 8), torch.nan)
    settle_ties(logits, hidden, rows)
    assert logits.isnan().all()
