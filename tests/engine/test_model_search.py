"""The largest of a row, found in pieces, are those that looking at every number finds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.sampler_search import highest, likeliest, total

VOCABS = st.sampled_from([1, 7, 64, 100, 128, 4096, 4097, 8192])


def some_logits(rows: int, vocab: int, steps: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, vocab) * 2 * steps).round() / steps
    return logits.masked_fill_(torch.rand(rows, vocab) < 0.1, -torch.inf)


@given(vocab=VOCABS, steps=st.sampled_from([1, 4, 1000]), seed=st.integers(0, 1000))
def test_the_likeliest_is_the_lowest_of_the_largest(vocab: int, steps: int, seed: int) -> None:
    logits = some_logits(5, vocab, steps, seed)
    ids, values = highest(logits)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(values, logits.amax(-1))


@given(vocab=VOCABS, steps=st.sampled_from([1, 4, 1000]), seed=st.integers(0, 1000), data=st.data())
def test_those_that_are_sure_are_in_the_order_of_all(
    vocab: int, steps: int, seed: int, data: st.DataObject
) -> None:
    logits = some_logits(3, vocab, steps, seed)
    count = data.draw(st.integers(1, min(vocab, 300)))
    ids, sure = likeliest(logits, count)
    whole = torch.sort(logits, dim=-1, descending=True, stable=True)
    for row in range(3):
        assert ids[row, : sure[row]].tolist() == whole.indices[row, : sure[row]].tolist()
        assert len(set(ids[row].tolist())) == count
        assert logits[row, ids[row]].tolist() == whole.values[row, :count].tolist()


@given(vocab=VOCABS, seed=st.integers(0, 100))
def test_a_row_with_a_nan_says_so(vocab: int, seed: int) -> None:
    logits = some_logits(3, vocab, 1, seed)
    logits[1, seed % vocab] = torch.nan
    assert torch.isnan(highest(logits)[1]).tolist() == [False, True, False]


@given(vocab=VOCABS, seed=st.integers(0, 100))
def test_totals_are_right_to_float32(vocab: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = torch.rand(3, vocab)
    torch.testing.assert_close(
        total(weights), weights.double().sum(-1, keepdim=True), atol=0, rtol=1e-6
    )
