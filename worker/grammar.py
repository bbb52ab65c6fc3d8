"""Grammars in the engine: compiled ones kept, and the masks of the slots that have one.

A grammar is compiled before its request is queued, by whoever submits it; the engine's thread
only copies it. Where an answer stands follows from its output ids alone, so that a preempted or
resumed one goes on as it would have. Invariant: a slot's mask and its faults are its own, though
slots of one grammar share what has been worked out about it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from core.protocol import Grammar
from text.grammar import Compiled, GrammarError, Grammars, told, writable
from worker.machine import cores
from worker.sampler_masks import Fill, MaskError
from worker.step import Opening

# Compiled grammars that nobody uses at the moment. One takes 10 kB, and 50 MB where an answer
# went through as many states as it may: some are kept, so that all of them stay under a gigabyte.
KEPT_MAX = 16
# Masks that are worth sharing out to threads: one takes microseconds, to wake a thread as long.
SHARED_MIN = 8
BROKEN = "the output so far breaks its grammar"
NOTHING_FITS = "no token of this model fits the grammar here"


# Of each: after how many seconds, and whether it could be compiled. Called by whoever compiled.
OnCompile = Callable[[float, bool], None]


class CompiledGrammars:
    """One version's, by what they say. Thread-safe; each is compiled once for all who ask.

    One that is in use stays, whatever else is asked for.
    """

    def __init__(self, grammars: Grammars, kept_max: int = KEPT_MAX) -> None:
        self.vocabulary = grammars.vocabulary
        self.on_compile: OnCompile = lambda _seconds, _ok: None
        self._grammars = grammars
        self._kept_max = kept_max
        self._lock = threading.Lock()
        self._used: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._coming: dict[Grammar, Future[Compiled]] = {}

    def get(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError. Compiles if it must, or waits for who does: up to half a second."""
        with self._lock:
            found = self._used.get(grammar)
            if found is not None:
                self._keep(grammar, found)
                return found
            coming = self._coming.get(grammar)
            mine = coming is None
            if coming is None:
                coming = self._coming[grammar] = Future()
        if mine:
            self._compile(grammar, coming)
        return coming.result()

    def forget(self, grammar: Grammar) -> None:
        """Compile it afresh for the next who asks."""
        with self._lock:
            self._used.pop(grammar, None)
            self._kept.pop(grammar, None)

    def _compile(self, grammar: Grammar, coming: Future[Compiled]) -> None:
        started = time.monotonic()
        try:
            compiled = self._grammars.compile(grammar)
        except BaseException as error:  # noqa: BLE001 - those who wait must hear of any
            with self._lock:
                del self._coming[grammar]
            coming.set_exception(error)
            self.on_compile(time.monotonic() - started, False)  # noqa: FBT003 - it has two words
            return
        with self._lock:
            del self._coming[grammar]
            self._keep(grammar, compiled)
        coming.set_result(compiled)
        self.on_compile(time.monotonic() - started, True)  # noqa: FBT003 - it has two words

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        self._used[grammar] = compiled
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)


class _Place:
    """A slot with a grammar: how far its answer is."""

    __slots__ = ("compiled", "fault", "grammar", "ids", "matcher")

    def __init__(self, grammar: Grammar, compiled: Compiled | None, ids: Sequence[int]) -> None:
        self.grammar = grammar
        self.compiled = compiled  # None: what it had in common is spoilt, its matcher is its own
        self.ids = list(ids)
        self.matcher: LLMatcher | None = None
        self.fault = ""


class GrammarMasks:
    """Implements `worker.sampler_masks.Masks`."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self._grammars = grammars
        threads = cores() // 2
        self._executor = LLExecutor(threads) if threads > 1 else None
        self._places: dict[int, _Place] = {}
        # Whatever a grammar says, it never lets a control token through.
        self._writable = writable(grammars.vocabulary)
        self._bits = np.zeros((0, len(self._writable)), dtype=np.int32)

    def open(self, slot: int, opening: Opening) -> None:
        """See `Masks`."""
        self._places.pop(slot, None)
        grammar = opening.sampling.grammar
        if grammar is None:
            return
        place = self._places[slot] = _Place(grammar, None, opening.output_ids)
        try:
            place.compiled = self._grammars.get(grammar)
        except GrammarError as error:
            place.fault = f"the grammar {error}"
            return
        place.matcher = place.compiled.matcher()
        if not place.matcher.consume_tokens(place.ids) and not self._start_over(place):
            place.fault = BROKEN

    def fill(self, slots: Sequence[int]) -> Fill | None:
        """See `Masks`."""
        asked = [(at, self._places[slot]) for at, slot in enumerate(slots) if slot in self._places]
        if not asked:
            return None
        faults = {at: place.fault for at, place in asked if place.fault}
        live = [(at, place) for at, place in asked if not place.fault]
        bits = self._fill([place for _, place in live])
        good = []
        for row, (at, place) in enumerate(live):
            if place.fault:
                faults[at] = place.fault
            elif not bits[row].any():
                faults[at] = NOTHING_FITS
            else:
                good.append(row)
        kept = bits if len(good) == len(live) else bits[good]
        return Fill(
            places=tuple(live[row][0] for row in good),
            bits=torch.from_numpy(kept),
            faults=tuple(sorted(faults.items())),
        )

    def accept(self, slot: int, token_id: int) -> bool:
        """See `Masks`."""
        place = self._places[slot]
        place.ids.append(token_id)
        assert place.matcher is not None
        if not place.matcher.consume_token(token_id) and not self._start_over(place):
            place.fault = BROKEN
            raise MaskError(place.fault)
        return place.matcher.is_stopped()

    def _fill(self, places: Sequence[_Place]) -> NDArray[np.int32]:
        """Their masks, in rows. Sets the fault of those that cannot be worked out."""
        if len(places) > len(self._bits):
            self._bits = np.zeros((len(places), len(self._writable)), dtype=np.int32)
        bits = self._bits[: len(places)]
        if not places:
            return bits
        self._mask(places, bits)
        for row, place in enumerate(places):
            assert place.matcher is not None
            if not place.matcher.is_error():
                continue
            message = told(place.matcher.get_error())
            if self._start_over(place):
                self._mask([place], bits[row : row + 1])
                message = told(place.matcher.get_error()) if place.matcher.is_error() else ""
            place.fault = message and f"the grammar cannot go on here: {message}"
        np.bitwise_and(bits, self._writable, out=bits)
        return bits

    def _mask(self, places: Sequence[_Place], bits: NDArray[np.int32]) -> None:
        matchers = [(place.matcher, row) for row, place in enumerate(places) if place.matcher]
        if self._executor is not None and len(matchers) >= SHARED_MIN:
            fill_next_token_bitmask_par(self._executor, matchers, bits)
            return
        for matcher, row in matchers:
            fill_next_token_bitmask(matcher, bits, row)

    def _start_over(self, place: _Place) -> bool:
        """After an error: again from the first token, with nothing shared.

        Slots of one grammar use up its states together, so an error may be the others' doing.
        One that took long to compile is not compiled between two steps, and fails with them.
        """
        compiled, place.compiled = place.compiled, None
        if compiled is None:
            return False
        self._grammars.forget(place.grammar)
        if not compiled.quick:
            return False
        place.matcher = compiled.fresh()
        return place.matcher.consume_tokens(place.ids)
