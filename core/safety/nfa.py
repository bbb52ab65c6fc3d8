"""Patterns as one automaton without memory of its own: a number for each state, sets as bits.

States read a character of a set, ask about a place, or say that a rule matches. `after` has
them behind every choice, so that a set of states is what a text has led to and no more.
Construction after Thompson (CACM 11, 1968), in reverse: each part is built before what follows.
"""

from collections.abc import Iterable

from core.safety.syntax import (
    Char,
    CharSet,
    Either,
    Node,
    PatternError,
    Place,
    Repeat,
    Sequence,
)

STATES_MAX = 1_000  # of one pattern, which bounds its matches too: each character takes one

# Kinds of neighbours, for places.
EDGE, OTHER, DIGIT, WORD = range(4)
KINDS = 4


class NFA:
    """Several rules' patterns side by side. Bits are numbered as states are."""

    def __init__(self) -> None:
        self.size = 0
        self.sets: list[tuple[int, CharSet]] = []  # states that read
        self.places: list[tuple[int, str]] = []
        self.after: list[int] = []  # by state: the states behind it, as bits
        self.starts: list[int] = []  # by rule: where it begins, as bits
        self.members: list[int] = []  # by rule: its states, as bits
        self.matches: list[int] = []  # by rule: its last state, as a bit
        self.match_bits = 0

    @property
    def start_bits(self) -> int:
        """Where any rule begins."""
        bits = 0
        for start in self.starts:
            bits |= start
        return bits

    def add(self, nodes: Iterable[Node]) -> int:
        """One rule more, which matches as any of `nodes`; returns its number.

        Raises PatternError for what is too large, or matches nothing at all.
        """
        first = self.size
        match = self._state(0)
        self.match_bits |= match
        starts = 0
        for node in nodes:
            check(node)
            starts |= self._build(node, match)
        self.starts.append(starts)
        self.matches.append(match)
        self.members.append((1 << self.size) - (1 << first))
        return len(self.starts) - 1

    def _state(self, after: int) -> int:
        self.after.append(after)
        self.size += 1
        return 1 << (self.size - 1)

    def _build(self, node: Node, after: int) -> int:
        """The states that a part begins with, where `after` follows it."""
        match node:
            case Char(of=charset):
                bit = self._state(after)
                self.sets.append((self.size - 1, charset))
                return bit
            case Place(what=what):
                bit = self._state(after)
                self.places.append((self.size - 1, what))
                return bit
            case Sequence(parts=parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case Either(parts=parts):
                bits = 0
                for part in parts:
                    bits |= self._build(part, after)
                return bits
            case _:
                begin = after
                for _ in range(node.high - node.low):
                    begin = self._build(node.part, begin) | after
                for _ in range(node.low):
                    begin = self._build(node.part, begin)
                return begin


def check(node: Node) -> None:
    """Raises PatternError: too many states, or an empty match."""
    states, shortest, _ = measure(node)
    if states > STATES_MAX:
        raise PatternError(f"it needs {states} states, and may have {STATES_MAX}")
    if shortest == 0:
        raise PatternError("it matches the empty text")


def measure(node: Node) -> tuple[int, int, int]:
    """States that it takes, and the fewest and most characters that it matches."""
    match node:
        case Char():
            return 1, 1, 1
        case Place():
            return 1, 0, 0
        case Repeat(part=part, low=low, high=high):
            states, shortest, longest = measure(part)
            return states * high, shortest * low, longest * high
        case Sequence(parts=parts):
            sizes = [measure(part) for part in parts] or [(0, 0, 0)]
            states, shortest, longest = (sum(size[at] for size in sizes) for at in range(3))
            return states, shortest, longest
        case _:
            sizes = [measure(part) for part in node.parts]
            return (
                sum(size[0] for size in sizes),
                min(size[1] for size in sizes),
                max(size[2] for size in sizes),
            )


def holds(place: str, before: int, after: int) -> bool:
    """Whether a place lies between neighbours of these kinds."""
    is_edge = (before >= DIGIT) != (after >= DIGIT)
    return {
        "^": before == EDGE,
        "$": after == EDGE,
        "b": is_edge,
        "B": not is_edge,
        "<w": before < DIGIT,
        ">w": after < DIGIT,
        "<d": before != DIGIT,
        ">d": after != DIGIT,
    }[place]
