"""Text from tokens, piece by piece: never half a character, never the start of a stop string.

Bytes go through an incremental UTF-8 decoder, so a character leaves when its last byte has
come, and an invalid sequence becomes U+FFFD just as in a decode of the whole. Text leaves as
soon as no stop string could still begin in it.

Invariant: concat(released) == decode(all bytes), up to the first stop string to be completed.
"""

import codecs
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Protocol


class TokenText(Protocol):
    """What the engine needs of a model version's text rules (`text.rules.TextRules`)."""

    @property
    def eos_ids(self) -> AbstractSet[int]:
        """Tokens that end an answer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    def token_bytes(self, id: int, /) -> bytes:  # noqa: A002 -- the name is the contract's
        """Raw bytes of one token; none for a special one."""
        ...


class _StopMatcher:
    """Knuth, Morris and Pratt (1977): how much of one stop string the text's end could begin.

    Linear in the text whatever the string, which a caller chooses.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]  # for each matched length less one: its longest proper border
        for char in stop[1:]:
            self._fallback.append(self._advance(self._fallback[-1], char))

    def feed(self, char: str) -> bool:
        """Whether this character completes the stop string. Another may begin in its end."""
        self.matched = self._advance(self.matched, char)
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._fallback[-1]
        return complete

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.stop[matched] == char)


class Detokenizer:
    """One answer's text. `stopped` is the stop string that ended it, once one has.

    The first stop string to be completed wins; of several completed by one character, the
    longest. So the result does not depend on where token boundaries fall, but for the one
    where stop strings begin to count: what is completed earlier is text like any other.
    """

    def __init__(self, text: TokenText, stops: Iterable[str]) -> None:
        self.stopped: str | None = None
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self._may_stop = True

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that this token sets free. Only one that `may_stop` completes a stop string."""
        self._may_stop = may_stop
        assert self.stopped is None, "nothing follows a stop string"
        return self._release(self._take(self._decoder.decode(self._text.token_bytes(token_id))))

    def finish(self) -> str:
        """The text still held: the answer ends here. An unfinished character is U+FFFD."""
        if self.stopped is None:
            self._take(self._decoder.decode(b"", final=True))
        return self._release(0)

    def _take(self, chars: str) -> int:
        """Returns how many characters to hold: a stop string could begin in them."""
        for count, char in enumerate(chars, 1):
            # Every matcher moves, so that none is behind when another completes.
            completed = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if completed and self._may_stop:
                self._held = (self._held + chars[:count]).removesuffix(completed[0])
                self.stopped = completed[0]
                return 0
        self._held += chars
        return max((matcher.matched for matcher in self._matchers), default=0)

    def _release(self, hold: int) -> str:
        cut = len(self._held) - hold
        released, self._held = self._held[:cut], self._held[cut:]
        return released
