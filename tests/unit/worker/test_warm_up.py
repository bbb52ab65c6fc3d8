"""The largest steps: as many tokens and rows as there can be, over one block."""

from hypothesis import given
from hypothesis import strategies as st

from worker.warm_up import largest_steps


@given(
    batched=st.integers(1, 2000),
    sequences=st.integers(1, 80),
    context=st.integers(1, 5000),
    block=st.sampled_from([1, 16, 128]),
)
def test_they_reach_every_bound_and_need_one_block(batched, sequences, context, block):
    whole, chunk, decodes = largest_steps(
        batched_tokens=batched, sequences=sequences, context_tokens=context, block_tokens=block
    )
    assert whole.num_tokens == min(batched, context)
    assert len(decodes.rows) == sequences
    assert {row.draw.slot for row in decodes.rows} == set(range(sequences))
    ends = []
    for plan in (whole, chunk, decodes):
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            assert set(row.blocks) == {0}
            assert len(row.blocks) == -(-end // block)
            assert 0 <= row.start < end <= context
            ends.append(end)
    assert chunk.rows[0].start + len(chunk.rows[0].token_ids) == context
    assert max(row.start + 1 for row in decodes.rows) == context
