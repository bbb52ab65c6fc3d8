"""Who waits, who runs, and on which slot. Moves sequences between the two; decides nothing.

Invariant: a sequence is in one of the lists as its state says, and has a slot while it runs.
"""

from worker.sequence import Sequence, State


class Line:
    """`max_sequences` slots, and those without one."""

    def __init__(self, max_sequences: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.slots = list(range(max_sequences - 1, -1, -1))  # free ones, lowest last

    @property
    def is_full(self) -> bool:
        """Whether nobody else can run."""
        return not self.slots

    def wait(self, sequence: Sequence) -> None:
        """New, or just stopped."""
        sequence.state = State.WAITING
        self.waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Give it a slot, if it waits or not."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        sequence.slot = self.slots.pop()
        sequence.slot_opened = False

    def stop(self, sequence: Sequence) -> None:
        """Take its slot. The caller says where it goes next."""
        self.running.remove(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = -1


def by_priority(sequence: Sequence) -> tuple[int, int]:
    """A sort key: who goes first is the smallest."""
    return sequence.priority
