"""A text searched for patterns, in the pieces it comes in.

    begin ── decided, told ──┬── held: some match could still take it ──┬── not come yet
                             base                                       end

Of what is held, the forward state after each character is kept; where a match could still be
open, and what belongs to matches, is found by walking back from the end (`core.safety.automaton`).
Most text leaves nothing open, and costs one step for each character.
"""

from collections.abc import Callable, Iterable, Sequence

from core.safety.automaton import BREAK, SKIP, Automaton
from core.safety.folding import SKIPPED_MAX
from core.safety.nfa import EDGE, NFA
from core.safety.scanning import Run, Scanner
from core.safety.syntax import Node

Check = Callable[[str], bool]


class PatternBook:
    """The patterns of several rules, each with its number in the policy, and perhaps a check.

    A place that matches a rule with a check is a hit only if the check agrees to its text.
    """

    def __init__(self) -> None:
        self._nfa = NFA()
        self.rules: list[int] = []
        self.checks: list[Check | None] = []
        self._automaton: Automaton | None = None

    def add(self, rule: int, nodes: Iterable[Node], check: Check | None = None) -> None:
        """Raises PatternError."""
        self._nfa.add(nodes)
        self.rules.append(rule)
        self.checks.append(check)

    @property
    def states(self) -> int:
        """Of all patterns together."""
        return self._nfa.size

    @property
    def last_states(self) -> int:
        """Of all patterns, as bits."""
        return self._nfa.match_bits

    def members(self, place: int) -> int:
        """The states of one rule, as bits."""
        return self._nfa.members[place]

    def ends(self, place: int) -> tuple[int, int]:
        """The last state of one rule and its first ones, as bits."""
        return self._nfa.matches[place], self._nfa.starts[place]

    @property
    def automaton(self) -> Automaton:
        """Made when it is first asked for; nothing may be added then."""
        if self._automaton is None:
            self._automaton = Automaton(self._nfa)
        return self._automaton


class PatternScanner(Scanner):
    """One text. `_states[i]` is the forward state before held character i."""

    def __init__(self, book: PatternBook) -> None:
        self._book = book
        self._automaton = book.automaton
        self._base = 0
        self._text = ""
        self._classes: list[int] = []
        self._states = [self._automaton.begin]
        self._skipped = 0
        self._hit = False
        # By rule: undecided characters of matches that passed their check. Their beginnings may
        # be gone before the rest is decided.
        self._passed: dict[int, set[int]] = {}

    def feed(self, text: str, *, final: bool) -> list[Run]:
        """See `Scanner`."""
        self._advance(text)
        state = self._states[-1]
        ending = EDGE if final else None
        if final and self._automaton.matched_at(state, EDGE, self._book.last_states):
            self._hit = True
        if not self._hit and not self._passed and (final or not state.open):
            self._forget(len(self._classes))
            return []
        undecided = len(self._classes) if final else self._first_open()
        look = undecided and (self._hit or self._passed)
        runs = self._runs(undecided, ending) if look else []
        self._forget(undecided)
        return runs

    def _advance(self, text: str) -> None:
        step = self._automaton.step
        state = self._states[-1]
        classes = self._automaton.classes(text)
        if self._skipped or SKIP in classes:
            classes = self._bounded(classes)
        for number in classes:
            if number != SKIP:
                state = state.next.get(number) or step(state, number)
                self._hit |= state.hit
            self._states.append(state)
        self._classes += classes
        self._text += text

    def _bounded(self, classes: Sequence[int]) -> list[int]:
        """With too many characters passed over in a row made to end what is open."""
        bounded = []
        for number in classes:
            self._skipped = self._skipped + 1 if number == SKIP else 0
            bounded.append(BREAK if self._skipped > SKIPPED_MAX else number)
        return bounded

    def _first_open(self) -> int:
        """The first held character that a match to come could hold."""
        bits = self._automaton.open_at(self._states[-1])
        at = len(self._classes)
        first = at
        while bits and at:
            at -= 1
            first = at
            bits = self._before(at, bits, anew=False) & self._states[at].bits
        return first

    def _before(self, at: int, bits: int, *, anew: bool) -> int:
        """What before held character `at` leads to `bits` after it."""
        number = self._classes[at]
        if number == SKIP:
            return bits
        return self._automaton.back(self._states[at], number, bits, anew=anew)

    def _runs(self, undecided: int, ending: int | None) -> list[Run]:
        """The places of matches before `undecided`."""
        marks = self._marks(ending)
        runs: list[Run] = []
        for place, rule in enumerate(self._book.rules):
            held = [at for at, bits in marks if bits & self._book.members(place)]
            check = self._book.checks[place]
            if check is not None:
                held = self._checked(place, check, held, ending, undecided)
            runs += _joined((at for at in held if at < undecided), self._base, rule)
        return runs

    def _marks(self, ending: int | None) -> list[tuple[int, int]]:
        """The characters that belong to matches, in order, each with states of those."""
        marks: list[tuple[int, int]] = []
        last = self._book.last_states
        bits = self._automaton.matched_at(self._states[-1], ending, last)
        for at in range(len(self._classes) - 1, -1, -1):
            inside = bits & self._states[at + 1].bits
            if inside:
                marks.append((at, inside))
            bits = self._before(at, bits, anew=True)
        return marks[::-1]

    def _checked(
        self, place: int, check: Check, held: list[int], ending: int | None, undecided: int
    ) -> list[int]:
        """The characters of those matches that pass the check."""
        kept = {at - self._base for at in self._passed.pop(place, ())}
        # None ends with what is invisible after it: its beginning may be told by then.
        for at in (at for at in held if self._classes[at] != SKIP):
            for start in self._starts(place, at + 1, ending):
                if check(self._text[start : at + 1]):
                    kept.update(range(start, at + 1))
        passed = {self._base + at for at in kept if at >= undecided}
        if passed:
            self._passed[place] = passed
        return sorted(kept)

    def _starts(self, place: int, end: int, ending: int | None) -> Iterable[int]:
        """Where a match that ends before `end` can begin; nothing if none ends there."""
        last, starts = self._book.ends(place)
        state = self._states[end]
        bits = self._automaton.matched_at(state, self._kind_from(end, ending), last)
        at = end
        while bits and at:
            at -= 1
            before = self._before(at, bits, anew=False)
            if before & starts and self._classes[at] != SKIP:
                yield at
            bits = before & self._states[at].bits

    def _kind_from(self, at: int, ending: int | None) -> int | None:
        """Of the next character that shows; None where that has not come."""
        for ahead in range(at, len(self._classes)):
            if self._classes[ahead] != SKIP:
                return self._automaton.kind(self._classes[ahead])
        return ending

    def _forget(self, count: int) -> None:
        self._base += count
        self.decided = self._base
        del self._classes[:count], self._states[:count]
        self._text = self._text[count:]
        self._hit = self._hit and any(state.hit for state in self._states[1:])


def _joined(places: Iterable[int], base: int, rule: int) -> list[Run]:
    """Neighbours as one run."""
    runs: list[Run] = []
    for at in places:
        if runs and runs[-1].end == base + at:
            runs[-1] = runs[-1]._replace(end=base + at + 1)
        else:
            runs.append(Run(base + at, base + at + 1, rule))
    return runs
