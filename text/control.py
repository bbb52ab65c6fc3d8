r"""Tells the template's control tokens from the same characters written by a user.

Content is *marked* before rendering: one private character goes inside every run of content
that could be part of a control token. After rendering the marks come out again, and a match
with a mark inside it is text. The invariant: no match that holds a character of content is a
control token, even one pieced together from content and template.

    content   a <|im_end|> b          rendered   …<|im_start|>user\na <M|im_end|> b<|im_end|>…
    marked    a <M|im_end|> b         control     ^^^^^^^^^^^^                      ^^^^^^^^^^
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from text.chat import TextRefusedError

# Private use: no model's vocabulary gives these a meaning. One that the text lacks is taken.
MARKS = tuple(chr(code) for code in range(0xF0000, 0xF0040))


class ControlToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token with a meaning to the model that text must not have.

    `lstrip` and `rstrip` swallow white space beside it; `single_word` needs a word boundary
    on both sides (all three as in Hugging Face's `AddedToken`).
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Rendered(msgspec.Struct, frozen=True):
    """A prompt and where its marks were: offsets into `text`, rising."""

    text: str
    marks: Sequence[int] = ()


class Match(msgspec.Struct, frozen=True):
    """A control token at [start, end) of the text, swallowed white space included."""

    start: int
    end: int
    id: int


class ControlTokens:
    """All control tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        self.ids = frozenset(token.id for token in self._by_text.values())
        # Longest first, so that an alternation finds the leftmost longest, as tokenizers do.
        texts = sorted(self._by_text, key=len, reverse=True)
        pattern = "|".join(map(re.escape, texts)) or r"(?!)"
        self._control = re.compile(pattern)
        # Templates may change the case of content; tokens inside one another all count.
        self._inside = re.compile(f"(?=({pattern}))", re.IGNORECASE)
        folded = [text.casefold() for text in texts]
        self._heads = frozenset(text[:end] for text in folded for end in range(1, len(text)))
        self._tails = frozenset(text[start:] for text in folded for start in range(1, len(text)))
        self._first = frozenset(text[:1] for text in folded)
        self._last = frozenset(text[-1:] for text in folded)
        self._middles = "\0".join(text[1:-1] for text in folded)
        self._reach = max(map(len, texts), default=0)
        self._single = frozenset(text for text in texts if len(text) == 1)

    def mark(self, content: str, mark: str) -> str:
        """`content` with `mark` wherever a control token could otherwise come of it."""
        if not content or not self._by_text:
            return content
        if any(letter in content for letter in self._single):
            # A token of one character has no inside to put a mark in.
            raise TextRefusedError("the text holds a control token of one character")
        places = {match.start() + 1 for match in self._inside.finditer(content)}
        core = content.strip()
        start = content.find(core)
        # Templates trim, so the ends that may meet the template's text are those of the core.
        places |= self._edges(content, 0, len(content))
        if len(core) < len(content):
            places |= self._edges(content, start, start + len(core))
        return _insert(content, sorted(places), mark)

    def find(self, rendered: Rendered) -> Iterator[Match]:
        """Control tokens in order, without overlap: none has a mark inside."""
        text, position, floor = rendered.text, 0, 0
        while match := self._control.search(text, position):
            token = self._by_text[match.group()]
            if _marked(rendered.marks, match.start(), match.end()) or (
                token.single_word and not _stands_alone(text, match.start(), match.end())
            ):
                position = match.start() + 1
                continue
            start, end = _swallow(text, match, token, floor)
            yield Match(start, end, token.id)
            position = floor = end

    def _edges(self, content: str, start: int, end: int) -> set[int]:
        """Where the ends of content[start:end] need a mark: what they touch is not known."""
        if start == end:
            return set()
        tail = content[max(start, end - self._reach) : end].casefold()
        head = content[start : min(end, start + self._reach)].casefold()
        places: set[int] = set()
        # Most texts have none of these letters near their ends, and sets of letters are quick.
        if not self._first.isdisjoint(tail) and any(
            tail[at:] in self._heads for at in range(len(tail))
        ):
            places.add(end)
        if not self._last.isdisjoint(head) and any(
            head[: at + 1] in self._tails for at in range(len(head))
        ):
            places.add(start)
        if end - start < self._reach and content[start:end].casefold() in self._middles:
            places.add(start)
        return places


def choose_mark(texts: Collection[str]) -> str:
    """A mark that none of these texts holds. Raises TextRefusedError when they hold all."""
    for mark in MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise TextRefusedError("the text holds every character reserved for marking")


def unmark(marked: str, mark: str) -> Rendered:
    """Take the marks out and keep where they were."""
    pieces = marked.split(mark)
    places, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        places.append(at)
    return Rendered("".join(pieces), places)


def _insert(content: str, places: list[int], mark: str) -> str:
    bounds = [0, *places, len(content)]
    return mark.join(content[a:b] for a, b in pairwise(bounds))


def _marked(marks: Sequence[int], start: int, end: int) -> bool:
    at = bisect_right(marks, start)
    return at < len(marks) and marks[at] < end


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return not (re.fullmatch(r"\w", before) or re.fullmatch(r"\w", after))


def _swallow(text: str, match: re.Match[str], token: ControlToken, floor: int) -> tuple[int, int]:
    start, end = match.span()
    while token.lstrip and start > floor and text[start - 1].isspace():
        start -= 1
    while token.rstrip and end < len(text) and text[end].isspace():
        end += 1
    return start, end
