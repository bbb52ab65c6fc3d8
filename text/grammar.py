"""Grammars of one model version's vocabulary, compiled: what text an answer may be.

The gateway compiles to refuse a bad one in the caller's words, the worker to mask its draws.
Thread-safe. Compiling takes from one to some 200 ms without the interpreter's lock: never on an
event loop, never between two steps. Invariant: what compiles can begin.
"""

import re
import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from core.protocol import Grammar
from text.grammar_source import GrammarError, source

__all__ = ["Compiled", "GrammarError", "Grammars", "Vocabulary"]

# A mask takes at most about 5 ms with these, compiling 0.5 s, and an automaton's states 50 MB:
# a string of bounded length is good for 50,000 characters then.
LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=250_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # it would take seconds for a few kilobytes of schema
    verbose_errors=False,
)
# Compiling that takes no longer may be done again between two steps, where it must.
QUICK_S = 0.02
_MESSAGE_CHARS_MAX = 300
_POSITION = re.compile(r"^(at )?\d+\(\d+\): ")
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_ONE_OF = re.compile(r"oneOf constraints are not supported\..*anyOf")


class Vocabulary(Protocol):
    """What is needed of a version's text rules (`text.rules.TextRules`)."""

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


class Compiled:
    """A grammar, ready. Matchers made from it are independent, whatever becomes of the others."""

    def __init__(self, tokenizer: LLTokenizer, text: str, limits: LLParserLimits) -> None:
        """Raises GrammarError."""
        self._tokenizer = tokenizer
        self._source = text
        self._limits = limits
        started_s = time.perf_counter()
        self._first = self.fresh()
        self.quick = time.perf_counter() - started_s <= QUICK_S
        _assert_begins(self._first.deep_copy(), tokenizer.vocab_size)

    def matcher(self) -> LLMatcher:
        """At the start of a text. Microseconds: it shares what all of them have worked out."""
        return self._first.deep_copy()

    def fresh(self) -> LLMatcher:
        """The same, sharing nothing: takes as long as compiling did. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, self._source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(told(matcher.get_error()))
        return matcher

    def follows(self, ids: Sequence[int]) -> bool | None:
        """Whether the grammar is complete with these ids; None where they break it."""
        matcher = self.matcher()
        if not matcher.consume_tokens(list(ids)):
            return None
        return matcher.is_stopped()


class Grammars:
    """Compiles for one vocabulary. Its own tables take 0.2 s, once, at the first grammar."""

    def __init__(self, vocabulary: Vocabulary, limits: LLParserLimits = LIMITS) -> None:
        self.vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError; its message follows the name of the caller's field."""
        text = source(grammar)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    _Wrapper(self.vocabulary), eos_token=sorted(self.vocabulary.eos_ids)
                )
        return Compiled(self._tokenizer, text, self._limits)


def writable(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """A mask of what any grammar may allow: tokens that add text, and the ends."""
    allowed = np.zeros(-(-vocabulary.vocab_size // 32) * 32, dtype=np.uint8)
    ids = [i for i in range(vocabulary.vocab_size) if vocabulary.token_bytes(i)]
    allowed[[*ids, *vocabulary.eos_ids]] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


def told(error: str) -> str:
    """The library's message, in a caller's words: no trace, no text of ours, not too long."""
    if error.startswith("panic"):
        return "is too large or too complex"
    if error.startswith("NoExtension"):
        return "no text can satisfy it"
    message = re.split(r"\n *\d+ \||\n<", error, maxsplit=1)[0]
    message = _POSITION.sub("", message).replace("json-schema:///", "")
    message = _UNSUPPORTED.sub(r"these keywords are not supported: \1", message)
    message = _ONE_OF.sub("'oneOf' is supported only where its options are disjoint", message)
    return message[:_MESSAGE_CHARS_MAX].strip()


def _assert_begins(matcher: LLMatcher, vocab_size: int) -> None:
    """Raises GrammarError when no token could be the first, or finding them takes too long."""
    fill_next_token_bitmask(matcher, allocate_token_bitmask(1, vocab_size))
    if matcher.is_error():
        raise GrammarError(told(matcher.get_error()))


class _Wrapper(TokenizerWrapper):
    """The library's view of a vocabulary: bytes, and which tokens are no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = range(vocabulary.vocab_size)
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = min(vocabulary.eos_ids)
        self.tokens = [vocabulary.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if not self.tokens[i] or i in vocabulary.eos_ids]

    def __call__(self, s: str) -> list[int]:
        """Text into ids: asked for only by a grammar that forces tokens, which ours never do."""
        raise NotImplementedError(s)
