"""A language model without weights: KV is a chained hash of the fed tokens, a draw reads it all.

As in a transformer, the KV of a position depends on everything before it, and a draw reads
every position through the block table; so a block shared, evicted, copied or overwritten
wrongly changes the answer. The chain starts from the tenant's salt, so that KV of another
tenant is wrong KV even under the same prompt. `sequential` is the same model with no blocks,
no steps and no neighbours: what every answer is compared with.
"""

from collections.abc import Callable, Iterable, Sequence

from core.protocol import Sampling
from worker.step import Draw, Opening, Row, Sampled, StepPlan, StepResult

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCAB_SIZE = 64
_PAIRS = (first + second for first in LETTERS for second in LETTERS)
_TEXTS: list[str] = ["", *LETTERS, *_PAIRS][:VOCAB_SIZE]
_EOS_ONE_IN = 24
_MASK = (1 << 64) - 1

SaltOf = Callable[[int], bytes]  # of a sequence, by its number


class Letters:
    """Text rules: token 0 ends an answer, the others are one or two letters."""

    eos_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE

    def token_bytes(self, id: int, /) -> bytes:  # noqa: A002 -- the name is the contract's
        """ASCII; nothing for the token that ends an answer."""
        return _TEXTS[id].encode()


class SimulatedRunner:
    """Implements `worker.step.Runner`, and asserts what a plan promises."""

    def __init__(
        self, num_blocks: int, block_tokens: int, salt_of: SaltOf, *, host_blocks: int = 0
    ) -> None:
        self._block_tokens = block_tokens
        self._salt_of = salt_of
        self._kv = [[0] * block_tokens for _ in range(num_blocks)]
        self._host_kv = [[0] * block_tokens for _ in range(host_blocks)]
        self._slots: dict[int, Opening] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Write KV, then draw."""
        _assert_apart(plan, self._block_tokens)
        self._move(plan)
        for row in plan.rows:
            self._write(row)
        return StepResult(sampled=tuple(self._draw(row, row.draw) for row in plan.rows if row.draw))

    def _move(self, plan: StepPlan) -> None:
        """All sources are read before any destination is written."""
        read = [
            (self._kv, destination, list(self._kv[source])) for source, destination in plan.copies
        ]
        read += [(self._host_kv, to, list(self._kv[source])) for source, to in plan.moves_out]
        read += [(self._kv, to, list(self._host_kv[source])) for source, to in plan.moves_in]
        for memory, destination, values in read:
            memory[destination] = values

    def _write(self, row: Row) -> None:
        size = self._block_tokens
        before = row.start - 1
        value = self._kv[row.blocks[before // size]][before % size] if row.start else 0
        if not row.start:
            value = _root(self._salt_of(row.sequence))
        for position, token in enumerate(row.token_ids, row.start):
            value = _chain(value, token)
            self._kv[row.blocks[position // size]][position % size] = value

    def _draw(self, row: Row, draw: Draw) -> Sampled:
        end = row.start + len(row.token_ids)
        values = [value for block in row.blocks for value in self._kv[block]][:end]
        if draw.opening is not None:
            self._slots[draw.slot] = draw.opening
        opening = self._slots[draw.slot]
        token_id = _next_token(values, opening.sampling, opening.choice, draw.index)
        return Sampled(token_id=token_id)


def sequential(
    salt: bytes, prompt: Sequence[int], sampling: Sampling, choice: int, context_tokens: int
) -> list[int]:
    """The whole answer, ended by EOS, a stop string, `max_tokens` or the context."""
    kv: list[int] = []
    value = _root(salt)
    for token in prompt:
        value = _chain(value, token)
        kv.append(value)
    output: list[int] = []
    most = min(sampling.max_tokens, context_tokens - len(prompt))
    while len(output) < most:
        token = _next_token(kv, sampling, choice, len(output))
        output.append(token)
        if token == EOS or any(stop in _text(output) for stop in sampling.stop):
            break
        value = _chain(value, token)
        kv.append(value)
    return output


def text_of(output: Sequence[int], stops: Iterable[str]) -> str:
    """The answer's text, cut before the first stop string to be completed."""
    whole = _text(output)
    for end in range(1, len(whole) + 1):
        done = [stop for stop in stops if whole[:end].endswith(stop)]
        if done:
            return whole[: end - max(map(len, done))]
    return whole


def _text(ids: Iterable[int]) -> str:
    return "".join(_TEXTS[token] for token in ids)


def _root(salt: bytes) -> int:
    return int.from_bytes(salt[:8], "big")


def _chain(before: int, token: int) -> int:
    return ((before ^ token) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK


def _next_token(kv: Sequence[int], sampling: Sampling, choice: int, index: int) -> int:
    """Greedy draws ignore (seed, choice, index)."""
    mixed = 0
    if sampling.temperature:
        for number in (sampling.seed, choice, index):
            mixed = _chain(mixed, number)
    for value in kv:
        mixed = ((mixed ^ value) * 0x9E3779B97F4A7C15) & _MASK
    high = mixed >> 40
    if high % _EOS_ONE_IN == 0:
        return EOS
    return 1 + (high // _EOS_ONE_IN) % (VOCAB_SIZE - 1)


def _assert_apart(plan: StepPlan, block_tokens: int) -> None:
    """No row writes a block that another row reads, and tables cover exactly their rows."""
    readers: dict[int, set[int]] = {}
    for row in plan.rows:
        end = row.start + len(row.token_ids)
        assert len(row.blocks) == -(-end // block_tokens), "the table covers just the row"
        for block in row.blocks:
            readers.setdefault(block, set()).add(row.sequence)
    for row in plan.rows:
        for block in row.blocks[row.start // block_tokens :]:
            assert readers[block] == {row.sequence}, f"block {block} is written while read"
