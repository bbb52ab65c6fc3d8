"""Many terms in one pass over a text: the automaton of Aho and Corasick (CACM 18, 1975).

A node is a beginning of some term, and the text's longest ending that is one leads to the node.
So the node's depth says how far back a term could still be open: nothing else is held back.
"""

from collections import deque
from collections.abc import Iterable

from core.safety.folding import SKIPPED_MAX, fold, is_word
from core.safety.scanning import Run, Scanner


class TermBook:
    """The folded terms of one rule."""

    def __init__(self, terms: Iterable[str], *, whole_word: bool) -> None:
        self.whole_word = whole_word
        self.goto: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.lengths: list[tuple[int, ...]] = [()]  # of terms that end here, longest first
        for term in terms:
            self._add("".join(map(fold, term)))
        self.length_max = max(self.depth)
        self._link()
        # How far back a term that could still grow goes.
        self.open = [0] * len(self.goto)
        for node in self._by_depth():
            self.open[node] = self.depth[node] if self.goto[node] else self.open[self.fail[node]]

    def step(self, node: int, char: str) -> int:
        """The node after one more folded character."""
        goto, fail = self.goto, self.fail
        while True:
            after = goto[node].get(char)
            if after is not None:
                return after
            if not node:
                return 0
            node = fail[node]

    def _add(self, term: str) -> None:
        node = 0
        for char in term:
            after = self.goto[node].get(char)
            if after is None:
                after = len(self.goto)
                self.goto[node][char] = after
                self.goto.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.lengths.append(())
            node = after
        self.lengths[node] = (len(term),)

    def _link(self) -> None:
        for node in self._by_depth():
            for char, after in self.goto[node].items():
                if node:
                    self.fail[after] = self.step(self.fail[node], char)
                    self.lengths[after] += self.lengths[self.fail[after]]

    def _by_depth(self) -> Iterable[int]:
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            yield node
            waiting.extend(self.goto[node].values())


class TermScanner(Scanner):
    """One text searched by a book, as rule number `rule`."""

    def __init__(self, book: TermBook, rule: int) -> None:
        self._book = book
        self._rule = rule
        self._node = 0
        self._chars = 0
        self._skipped = 0
        # Of the last folded characters: where they come from, and whether they are of words.
        self._origins: list[int] = []
        self._words: list[bool] = []
        self._waiting: list[int] = []  # starts of terms that must not be followed by a word
        self._hit_end = -1  # of the last term found: what is invisible after it goes with it
        self._runs: list[Run] = []

    def feed(self, text: str, *, final: bool) -> list[Run]:
        """See `Scanner`."""
        starts = self._book.goto[0]
        for char in text:
            folded = fold(char)
            if not folded:
                self._skip()
            elif self._node or self._book.whole_word or len(folded) > 1 or folded in starts:
                self._skipped = 0
                for each in folded:
                    self._take(each)
            else:
                self._skipped = 0  # no term begins so, and none is open
            self._chars += 1
        if final:
            self._settle_waiting(by_word=False)
        before = self.decided
        self.decided = self._chars if final else self._first_open(before)
        return self._decided_runs(before)

    def _take(self, char: str) -> None:
        book = self._book
        word = book.whole_word and is_word(char)
        if self._waiting:
            self._settle_waiting(by_word=word)
        self._node = node = book.step(self._node, char)
        if not node and not book.whole_word:
            return
        self._origins.append(self._chars)
        self._words.append(word)
        if book.lengths[node]:
            self._found(book.lengths[node])
        if len(self._origins) > 4 * book.length_max + 16:
            keep = book.length_max + 1
            del self._origins[:-keep], self._words[:-keep]

    def _found(self, lengths: tuple[int, ...]) -> None:
        if not self._book.whole_word:
            self._hit(self._origins[-lengths[0]], self._chars + 1)
            return
        for length in lengths:
            at = len(self._origins) - length
            if at == 0 or not self._words[at - 1]:
                self._waiting.append(self._origins[at])

    def _hit(self, start: int, end: int) -> None:
        self._runs.append(Run(start, end, self._rule))
        self._hit_end = end

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped > SKIPPED_MAX:
            self._settle_waiting(by_word=False)
            self._node = 0
        elif self._chars == self._hit_end:
            self._hit(self._chars, self._chars + 1)

    def _settle_waiting(self, *, by_word: bool) -> None:
        if self._waiting and not by_word:
            # The term's last character may be the one that is being read, as in a ligature.
            self._hit(min(self._waiting), max(self._chars, self._origins[-1] + 1))
        self._waiting.clear()

    def _first_open(self, before: int) -> int:
        """Never before what was decided: a text may go on after its end."""
        depth = self._book.open[self._node]
        first = self._origins[-depth] if depth else self._chars
        return max(before, min([first, *self._waiting]))

    def _decided_runs(self, before: int) -> list[Run]:
        """Those from `before` to `decided`; one that reaches over it is told in parts."""
        told = [run for run in self._runs if run.start < self.decided]
        self._runs = [
            run._replace(start=max(run.start, self.decided))
            for run in self._runs
            if run.end > self.decided
        ]
        return [
            Run(max(run.start, before), min(run.end, self.decided), run.rule)
            for run in told
            if run.end > before
        ]
