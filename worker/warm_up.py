"""The largest steps there can be, as plans: what a start-up measures before it sizes the pool.

    1. as many prompt tokens as a step takes, from position 0     products of (T, width)
    2. a chunk that ends with the context                         attention over all of it
    3. every sequence at once, one of them at the context's end   rows of the vocabulary

They need one block: a table may name it as often as it likes where nobody reads the answers.
Attention works in pieces of bounded size, so that rows at the full context cost time and no
memory beyond that of one of them: the others stay short, and a start stays one of seconds.
Pure.
"""

from core.protocol import Sampling
from worker.step import Draw, Opening, Row, StepPlan

# One tile of any attention kernel here.
CHUNK_TOKENS = 64
# Of each sequence but one.
SHORT_TOKENS = 64

# Nothing of a flat distribution can be left out, so all of each row is sorted; penalties and
# logprobs take their own copies of it.
_HARDEST = Sampling(
    seed=0,
    max_tokens=1,
    temperature=1e4,
    top_p=0.999,
    min_p=1e-9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logprobs=20,
)


def largest_steps(
    *, batched_tokens: int, sequences: int, context_tokens: int, block_tokens: int
) -> tuple[StepPlan, ...]:
    """The three, for an empty pool of at least one block. Every row writes over the others."""

    def row(slot: int, end: int, count: int) -> Row:
        opening = Opening(choice=0, sampling=_HARDEST, prompt_ids=(0,), output_ids=(0,))
        return Row(
            sequence=slot,
            token_ids=(0,) * count,
            start=end - count,
            blocks=(0,) * -(-end // block_tokens),
            draw=Draw(slot=slot, index=1, opening=opening),
        )

    whole = min(batched_tokens, context_tokens)
    short = min(context_tokens, SHORT_TOKENS)
    decodes = (row(slot, short if slot else context_tokens, 1) for slot in range(sequences))
    return (
        StepPlan(rows=(row(0, whole, whole),)),
        StepPlan(rows=(row(0, context_tokens, min(CHUNK_TOKENS, whole)),)),
        StepPlan(rows=tuple(decodes)),
    )
