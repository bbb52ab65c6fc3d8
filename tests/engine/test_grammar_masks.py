"""Masks of real grammars, for slots that come, go, are preempted and are in each other's way."""

import json
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLExecutor, LLParserLimits

from core.protocol import Grammar, Sampling
from tests.support.engine_requests import EOS, FakeText
from tests.support.schemas import a_schema
from text.grammar import GrammarError, Grammars
from worker.grammar import BROKEN, NOTHING_FITS, CompiledGrammars, GrammarMasks
from worker.sampler_masks import MaskError, words_of
from worker.step import Opening

TEXT = FakeText()
GRAMMARS = CompiledGrammars(Grammars(TEXT))


def ids_of(text):
    return [1 + byte for byte in text.encode()]


def a_grammar(kind, text=""):
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def an_opening(grammar, output_ids=()):
    sampling = Sampling(seed=0, max_tokens=9, grammar=grammar)
    return Opening(choice=0, sampling=sampling, prompt_ids=(1,), output_ids=tuple(output_ids))


def the_masks(*openings):
    masks = GrammarMasks(GRAMMARS)
    for slot, opening in enumerate(openings):
        masks.open(slot, opening)
    return masks


def allowed(masks, slots):
    """Ids by place, of a fill."""
    filled = masks.fill(slots)
    bits = np.unpackbits(filled.bits.numpy().view(np.uint8), axis=1, bitorder="little")
    rows = [np.flatnonzero(row).tolist() for row in bits]
    return dict(zip(filled.places, rows, strict=True))


AB = a_grammar("regex", "ab")
YES = a_grammar("choice", '["yes", "jo"]')
LOOP = {"type": "object", "properties": {"l": {"$ref": "#/$defs/l"}}, "required": ["l"]}


def test_only_slots_with_a_grammar_are_filled():
    masks = the_masks(an_opening(None), an_opening(AB), an_opening(YES))
    assert masks.fill([0]) is None
    assert masks.fill([]) is None
    filled = masks.fill([2, 0, 1])
    assert filled.places == (0, 2)
    assert filled.faults == ()
    assert filled.bits.shape == (2, words_of(TEXT.vocab_size))
    assert allowed(masks, [2, 0, 1]) == {0: ids_of("jy"), 2: ids_of("a")}


def test_a_fill_advances_nothing():
    masks = the_masks(an_opening(AB))
    assert allowed(masks, [0]) == allowed(masks, [0])


def test_the_token_that_completes_a_grammar_ends_it():
    masks = the_masks(an_opening(AB))
    assert masks.accept(0, ids_of("a")[0]) is False
    assert masks.accept(0, ids_of("b")[0]) is True
    assert allowed(masks, [0]) == {0: [EOS]}


def test_a_grammar_that_may_go_on_ends_with_an_end():
    masks = the_masks(an_opening(a_grammar("regex", "ab*")))
    assert masks.accept(0, ids_of("a")[0]) is False
    assert allowed(masks, [0]) == {0: [EOS, *ids_of("b")]}
    assert masks.accept(0, EOS) is True


def test_a_token_that_breaks_the_grammar_is_that_slots_fault():
    # vllm #18783: a grammar that did not take its token ended more than its own request.
    masks = the_masks(an_opening(AB), an_opening(AB))
    with pytest.raises(MaskError, match=BROKEN):
        masks.accept(0, ids_of("x")[0])
    filled = masks.fill([0, 1])
    assert filled.places == (1,)
    assert filled.faults == ((0, BROKEN),)
    masks.open(0, an_opening(AB))
    assert masks.fill([0, 1]).places == (0, 1)


def test_a_grammar_that_cannot_compile_is_a_fault_of_its_slot():
    masks = the_masks(an_opening(a_grammar("regex", "(")), an_opening(AB))
    filled = masks.fill([0, 1])
    assert filled.places == (1,)
    assert "unclosed group" in filled.faults[0][1]
    assert masks.fill([0]).bits.shape == (0, words_of(TEXT.vocab_size))


def test_output_that_breaks_the_grammar_cannot_be_resumed():
    masks = the_masks(an_opening(AB, ids_of("x")))
    assert masks.fill([0]).faults == ((0, BROKEN),)


def test_a_slot_forgets_the_answer_before():
    masks = the_masks(an_opening(AB))
    masks.accept(0, ids_of("a")[0])
    masks.open(0, an_opening(YES))
    assert allowed(masks, [0]) == {0: ids_of("jy")}
    masks.open(0, an_opening(None))
    assert masks.fill([0]) is None


def test_a_grammar_that_runs_into_nothing_is_a_fault_when_it_does():
    schema = {"$defs": {"l": {"$ref": "#/$defs/l"}}, **LOOP}
    masks = the_masks(an_opening(a_grammar("json_schema", schema), ids_of('{"l":')))
    assert masks.fill([0]).faults == ((0, "the grammar cannot go on here: no text can satisfy it"),)


def test_a_text_that_the_vocabulary_cannot_spell_is_a_fault():
    pieces = FakeText()
    pieces._bytes[1 + ord("q")] = b""
    masks = GrammarMasks(CompiledGrammars(Grammars(pieces)))
    masks.open(0, an_opening(a_grammar("regex", "aq"), ids_of("a")))
    (fault,) = masks.fill([0]).faults
    assert fault[1] in (NOTHING_FITS, "the grammar cannot go on here: no text can satisfy it")


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_a_preempted_slot_goes_on_where_it_was(seed, length):
    dice = random.Random(seed)
    grammar = a_grammar("json_schema", a_schema(dice))
    masks = the_masks(an_opening(grammar), an_opening(YES))
    ids: list[int] = []
    for _ in range(length):
        ids.append(dice.choice(allowed(masks, [0])[0]))
        if masks.accept(0, ids[-1]):
            break
    before = allowed(masks, [0])
    masks.open(0, an_opening(None))
    masks.open(3, an_opening(grammar, ids))
    assert allowed(masks, [3]) == before


def test_states_used_up_by_one_slot_fail_no_other_of_its_grammar():
    limits = LLParserLimits(max_lexer_states=600, verbose_errors=False)
    masks = GrammarMasks(CompiledGrammars(Grammars(TEXT, limits)))
    grammar, shorter = a_grammar("regex", "[ab]{0,999}"), ids_of("ab" * 40)
    for slot in range(2):
        masks.open(slot, an_opening(grammar))
    for count in range(2_000):
        if masks.fill([0]).faults:
            break
        masks.accept(0, ids_of("ab")[count % 2])
    assert "too many states" in masks.fill([0]).faults[0][1]
    # What they had in common is spoilt; a slot that did not use it up itself goes on.
    for token in shorter:
        assert masks.fill([0, 1]).places == (1,)
        masks.accept(1, token)
    masks.open(0, an_opening(grammar, shorter))
    assert masks.fill([0, 1]).places == (0, 1)


def test_masks_are_the_same_by_however_many_threads():
    openings = [
        an_opening(a_grammar("regex", f"[a-z]{{{n + 1}}}"), ids_of("b" * n)) for n in range(12)
    ]
    alone, together = the_masks(*openings), the_masks(*openings)
    alone._executor, together._executor = None, LLExecutor(2)
    for slots in (range(12), range(3), [5]):
        assert allowed(alone, list(slots)) == allowed(together, list(slots))


def test_compiled_grammars_are_kept_while_used_and_otherwise_bounded():
    grammars = CompiledGrammars(Grammars(TEXT), kept_max=2)
    used = grammars.get(AB)
    for count in range(5):
        grammars.get(a_grammar("regex", f"a{{{count + 1}}}"))
    assert grammars.get(AB) is used
    assert len(grammars._kept) == 2
    assert len(grammars._used) <= 3


def test_a_grammar_is_compiled_once_for_all_who_ask_at_once():
    grammars, found = CompiledGrammars(Grammars(TEXT)), []
    threads = [threading.Thread(target=lambda: found.append(grammars.get(AB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_a_grammar_that_cannot_compile_says_so_to_each_who_asks():
    grammars = CompiledGrammars(Grammars(TEXT))
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed"):
            grammars.get(a_grammar("regex", "("))
    assert not grammars._coming
