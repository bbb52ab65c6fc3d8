"""What the KV bookkeeping must satisfy, looked at from outside: each problem as a sentence.

O(blocks): for tests, the simulator, and an engine that has nothing better to do.
"""

from collections.abc import Iterable, Sequence

from worker.prefix import Content
from worker.sequence import Sequence as Choice
from worker.sequence import State
from worker.tier import Tier


def copies_problems(contents: Sequence[Content], device: Tier, host: Tier) -> list[str]:
    """Contents that can be found, against what each block says that it holds."""
    found: list[str] = []
    copies = (
        ("device", device, {block: content for content in contents for block in content.device}),
        ("host", host, {block: content for content in contents for block in content.host}),
    )
    for name, tier, holds in copies:
        found += [
            f"{name} block {block}: its content and the index differ"
            for block, content in enumerate(tier.contents)
            if holds.get(block) is not content
        ]
    empty = sum(not (content.device or content.host) for content in contents)
    return [*found, f"{empty} contents in no block"] if empty else found


def line_problems(
    waiting: Sequence[Choice], running: Sequence[Choice], block_tokens: int
) -> list[str]:
    """Sequences that are not where their state says, or hold what that state does not."""
    found = []
    for state, sequences in ((State.WAITING, waiting), (State.RUNNING, running)):
        for sequence in sequences:
            covered = sequence.num_computed <= len(sequence.blocks) * block_tokens
            stowed = sequence.stowed is None or state is State.WAITING
            holds = bool(sequence.blocks) <= (state is State.RUNNING)
            if sequence.state is not state or not (covered and stowed and holds):
                found.append(f"sequence {sequence.number}: {sequence.state}, out of place")
    forks = [fork for sequence in (*waiting, *running) for fork in sequence.forks]
    found += [
        f"sequence {fork.number}: {fork.state}, before its prompt is computed"
        for fork in forks
        if fork.state is not State.FORKING or fork.blocks
    ]
    return found


def slot_problems(free: Iterable[int], running: Iterable[Choice], slots: int) -> list[str]:
    """Every slot is free or one sequence's."""
    listed = sorted([*free, *(sequence.slot for sequence in running)])
    return [] if listed == list(range(slots)) else [f"slots free or in use: {listed}"]
