"""The same automaton made deterministic as texts ask for it, forwards and backwards.

Forwards, a state is the set of places in patterns to which some beginning in the text has led.
Backwards, it is the part of that set from which the text goes on to a match (or, at its end,
still could). A character belongs to a match if and only if that part is not empty right after
it; so all matches of all rules are found in two passes, in time linear in the text.

States are made once and kept, at most `states_max`; then all are forgotten and made anew, at a
cost for each character bounded by the patterns' size.
"""

from collections.abc import Iterator

from core.safety.folding import is_word, narrow
from core.safety.nfa import DIGIT, EDGE, KINDS, NFA, OTHER, WORD, holds

SKIP = -1  # the class of characters that are passed over
BREAK = 0  # the class of a character that nothing matches
CLASSES_MAX = 65_536  # characters whose class is remembered


class Forward:
    """`bits` leave out the beginnings of patterns, which are everywhere."""

    __slots__ = ("back", "bits", "hit", "kind", "next", "open")

    def __init__(self, bits: int, kind: int, *, hit: bool, is_open: bool) -> None:
        self.bits = bits
        self.kind = kind  # of the character before it
        self.hit = hit  # a match ends here, or ended right before the last character
        self.open = is_open
        self.next: dict[int, Forward] = {}
        self.back: dict[tuple[int, int, bool], int] = {}  # see `Automaton.back`


class Automaton:
    """Shared by every text that is searched for these patterns."""

    def __init__(self, nfa: NFA, *, states_max: int = 10_000) -> None:
        self.nfa = nfa
        self._states_max = states_max
        self._start_bits = nfa.start_bits
        self._open_bits = ((1 << nfa.size) - 1) & ~nfa.match_bits
        self._places = [
            [
                [(1 << at, nfa.after[at]) for at, what in nfa.places if holds(what, before, after)]
                for after in range(KINDS)
            ]
            for before in range(KINDS)
        ]
        self._charsets = sorted({charset for _, charset in nfa.sets})
        self._classes: dict[str, int] = {}
        self._class_of: dict[tuple[tuple[bool, ...], int], int] = {}
        self._reading: list[int] = [0]  # by class: the states that read it, as bits
        self._kinds: list[int] = [OTHER]
        self._forward: dict[tuple[int, int, bool], Forward] = {}
        self._backs = 0
        self.made = 0  # states, ever
        self.begin = self._forward_state(0, EDGE, hit=False)

    # Characters.

    def classes(self, text: str) -> list[int]:
        """What each character is to these patterns."""
        known = self._classes
        try:
            return [known[char] for char in text]
        except KeyError:
            return [self._class(char) for char in text]

    def _class(self, char: str) -> int:
        known = self._classes.get(char)
        if known is None:
            if len(self._classes) >= CLASSES_MAX:
                self._classes.clear()
            known = self._classes[char] = self._new_class(narrow(char))
        return known

    def _new_class(self, char: str) -> int:
        if not char:
            return SKIP
        kind = DIGIT if "0" <= char <= "9" else WORD if is_word(char) else OTHER
        member = tuple(charset.holds(char) for charset in self._charsets)
        number = self._class_of.get((member, kind))
        if number is None:
            number = self._class_of[member, kind] = len(self._reading)
            reads = dict(zip(self._charsets, member, strict=True))
            self._reading.append(sum(1 << at for at, charset in self.nfa.sets if reads[charset]))
            self._kinds.append(kind)
        return number

    # Forwards.

    def step(self, state: Forward, number: int) -> Forward:
        """The state after a character of a class that is not passed over."""
        after = state.next.get(number)
        if after is None:
            kind = self._kinds[number]
            bits = self._placed(state.bits | self._start_bits, state.kind, kind)
            ended = bits & self.nfa.match_bits & ~state.bits
            reached = 0
            for at in _each(bits & self._reading[number]):
                reached |= self.nfa.after[at]
            hit = bool(ended or reached & self.nfa.match_bits)
            after = state.next[number] = self._forward_state(reached, kind, hit=hit)
        return after

    def kind(self, number: int) -> int:
        """Of a class that is not passed over."""
        return self._kinds[number]

    def _placed(self, bits: int, before: int, after: int) -> int:
        """With what lies behind the places that hold here."""
        places = self._places[before][after]
        last = -1
        while places and bits != last:
            last = bits
            for at, behind in places:
                if bits & at:
                    bits |= behind
        return bits

    def _forward_state(self, bits: int, kind: int, *, hit: bool) -> Forward:
        key = (bits, kind, hit)
        state = self._forward.get(key)
        if state is None:
            if len(self._forward) >= self._states_max:
                self._forget()
            is_open = bool(bits & self._open_bits)
            state = self._forward[key] = Forward(bits, kind, hit=hit, is_open=is_open)
            self.made += 1
        return state

    # Backwards.

    def open_at(self, state: Forward) -> int:
        """Where the text ends and more may come: what could still become a match."""
        return state.bits & self._open_bits

    def matched_at(self, state: Forward, next_kind: int | None, rules: int) -> int:
        """Where the text ends, or goes on so: what is matched of `rules`, their last states.

        `next_kind` None is not known yet.
        """
        if next_kind is None:
            return state.bits & rules
        key = (-1 - next_kind, rules, False)  # no class of characters is so low
        known = state.back.get(key)
        if known is None:
            full = self._placed(state.bits, state.kind, next_kind)
            known = self._leading(full & rules, full, state.kind, next_kind)
            state.back[key] = known
        return known

    def back(self, state: Forward, number: int, bits: int, *, anew: bool) -> int:
        """What of `state`, and of patterns' beginnings, a character leads to some of `bits`.

        With `anew`, what is matched before the character as well.
        """
        key = (number, bits, anew)
        known = state.back.get(key)
        if known is None:
            kind = self._kinds[number]
            full = self._placed(state.bits | self._start_bits, state.kind, kind)
            found = full & self.nfa.match_bits if anew else 0
            for at in _each(full & self._reading[number]):
                if self.nfa.after[at] & bits:
                    found |= 1 << at
            known = state.back[key] = self._leading(found, full, state.kind, kind)
            self._backs += 1
            if self._backs > self._states_max:
                self._forget()
        return known

    def _leading(self, bits: int, full: int, before: int, after: int) -> int:
        """With the places of `full` that hold here and lead to them."""
        places = self._places[before][after]
        last = -1
        while places and bits != last:
            last = bits
            for at, behind in places:
                if at & full and bits & behind:
                    bits |= at
        return bits

    def _forget(self) -> None:
        self._forward = {}
        self._backs = 0
        self.begin = self._forward_state(0, EDGE, hit=False)


def _each(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
