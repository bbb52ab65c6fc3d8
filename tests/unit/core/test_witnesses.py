"""What words come to, field by field: `test_ledger` says what follows for a bill."""

import pytest

from core.protocol import Usage
from core.witnesses import Heard, heard_from, largest, merge, metered
from tests.support.ledger_commands import a_witness

FULL = Usage(
    prompt_tokens=100,
    cached_tokens=40,
    cache_write_5m_tokens=20,
    cache_write_1h_tokens=10,
    output_tokens=50,
    reasoning_tokens=30,
)


def test_all_of_a_witness_is_heard():
    said = a_witness(
        usage=FULL,
        source="journal",
        final=True,
        cause="complete",
        replica_id="rep_7",
        at_ms=99,
    )
    assert heard_from(said) == Heard(
        usage=FULL, exact=True, final=True, cause="complete", replica_id="rep_7", at_ms=99
    )


@pytest.mark.parametrize("final", [False, True])
def test_that_a_word_is_the_last_is_heard_of_any_source(final):
    heard = heard_from(a_witness(source="checkpoint", final=final, cause=""))
    assert heard.final is final
    assert not heard.exact


def test_one_last_word_is_enough():
    last, other = Heard(usage=Usage(), final=True), Heard(usage=Usage())
    assert merge(last, other).final
    assert merge(other, last).final
    assert not merge(other, other).final


def test_of_two_words_the_later_and_fuller_facts_stay():
    one = Heard(usage=FULL, cause="aborted", replica_id="rep_2", at_ms=5)
    other = Heard(usage=Usage(), cause="complete", replica_id="rep_1", at_ms=9)
    assert merge(one, other) == Heard(usage=FULL, cause="complete", replica_id="rep_2", at_ms=9)


def test_the_largest_of_one_word_is_that_word():
    assert largest([FULL]) == FULL


def test_the_prompt_comes_whole_from_one_word_and_the_output_from_another():
    further = Usage(prompt_tokens=101, cache_write_1h_tokens=3, output_tokens=1)
    assert largest([FULL, further]) == Usage(
        prompt_tokens=101, cache_write_1h_tokens=3, output_tokens=50, reasoning_tokens=30
    )


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (
            Usage(prompt_tokens=9, cached_tokens=1, cache_write_1h_tokens=8),
            Usage(prompt_tokens=9, cached_tokens=2),
        ),
        (
            Usage(prompt_tokens=9, cache_write_1h_tokens=1, cache_write_5m_tokens=8),
            Usage(prompt_tokens=9, cache_write_1h_tokens=2),
        ),
        (
            Usage(prompt_tokens=9, cache_write_5m_tokens=1),
            Usage(prompt_tokens=9, cache_write_5m_tokens=2),
        ),
        (
            Usage(output_tokens=9, reasoning_tokens=1),
            Usage(output_tokens=9, reasoning_tokens=2),
        ),
    ],
)
def test_among_equals_the_part_that_comes_first_decides(less, more):
    assert largest([less, more]) == largest([more, less]) == more


def test_attempts_add_what_they_produced_and_thought_and_share_one_prompt():
    said = [(1, "journal", Heard(usage=FULL)), (2, "journal", Heard(usage=FULL))]
    assert metered(said) == Usage(
        prompt_tokens=100,
        cached_tokens=40,
        cache_write_5m_tokens=20,
        cache_write_1h_tokens=10,
        output_tokens=100,
        reasoning_tokens=60,
    )
