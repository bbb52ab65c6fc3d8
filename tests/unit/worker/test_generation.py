"""Choices, their text and their totals, without an engine."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Choice, Started, Timings, TokenLogprob, Usage
from tests.support.engine_requests import EOS, FakeText, a_request
from worker.faults import CHOICES_MAX, STOP_CHARS_MAX, STOPS_MAX, BadRequestError
from worker.generation import open_generation
from worker.sequence import State
from worker.step import Sampled

TEXT = FakeText()


def letters(text):
    """Token ids of ASCII text, one for each letter."""
    return tuple(1 + byte for byte in text.encode())


def opened(request, *, context_tokens=1000, text=TEXT):
    return open_generation(
        request, text, context_tokens=context_tokens, numbers=count(1), arrived_ms=100.0
    )


def push(generation, token_id, *, choice=0, now_ms=200.0, logprob=None):
    """As the scheduler does: the token is appended, then told."""
    sequence = next(s for s in generation.sequences if s.choice == choice)
    sequence.tokens.append(token_id)
    return generation.accept(sequence, Sampled(token_id=token_id, logprob=logprob), now_ms)


def test_ids_are_told_when_generated_and_text_when_whole():
    generation = opened(a_request(max_tokens=9))
    hangul = [1 + byte for byte in "한".encode()]
    told = [push(generation, token_id) for token_id in hangul]
    assert [t.ids for t in told] == [(t,) for t in hangul]
    assert [t.text for t in told] == ["", "", "한"]


def test_eos_ends_a_choice_with_its_id_and_no_text():
    generation = opened(a_request())
    push(generation, *letters("a"))
    last = push(generation, EOS)
    assert (last.ids, last.text, last.finish, last.stop) == ((EOS,), "", "stop", None)
    assert generation.complete


def test_eos_first_ends_a_choice_with_nothing_but_its_id():
    # vllm 52693: a turn of no tokens killed the engine.
    generation = opened(a_request(max_tokens=5))
    assert push(generation, EOS).finish == "stop"


def test_eos_is_a_token_like_any_other_when_it_is_to_be_ignored():
    generation = opened(a_request(ignore_eos=True, max_tokens=2))
    assert push(generation, EOS).finish is None
    assert push(generation, EOS).finish == "length"


def test_max_tokens_flushes_what_was_held():
    generation = opened(a_request(max_tokens=3, stop=("bcd!",)))
    told = [push(generation, token_id) for token_id in letters("abc")]
    assert [t.text for t in told] == ["a", "", "bc"]
    assert [t.finish for t in told] == [None, None, "length"]


def test_the_context_cuts_an_answer_as_max_tokens_does():
    generation = opened(a_request([1, 2, 3], max_tokens=50), context_tokens=5)
    assert [push(generation, t).finish for t in letters("ab")] == [None, "length"]


def test_a_stop_string_over_several_tokens_ends_the_text_before_it():
    generation = opened(a_request(stop=("END",)))
    told = [push(generation, token_id) for token_id in letters("aEND")]
    assert "".join(t.text for t in told) == "a"
    assert (told[-1].finish, told[-1].stop) == ("stop", "END")


def test_a_stop_string_on_the_last_allowed_token_counts_as_a_stop():
    generation = opened(a_request(stop=("b",), max_tokens=2))
    assert [push(generation, t).finish for t in letters("ab")] == [None, "stop"]


def test_logprobs_go_with_their_id():
    generation = opened(a_request(logprobs=1))
    logprob = TokenLogprob(id=5, logprob=-1.0, top=((5, -1.0),))
    assert push(generation, 5, logprob=logprob).logprobs == (logprob,)
    assert push(generation, 6).logprobs is None


def test_choices_end_each_for_itself_and_the_request_with_the_last():
    generation = opened(a_request(choices=(Choice(index=0), Choice(index=3)), max_tokens=2))
    generation.start("boot", 110.0)
    assert push(generation, 5, choice=3).choice == 3
    assert push(generation, EOS, choice=3).finish == "stop"
    assert not generation.complete
    assert [s.choice for s in generation.sequences] == [0]
    push(generation, EOS, choice=0)
    assert generation.complete
    assert generation.finished("complete", 300.0).usage.output_tokens == 3


def test_timings_run_from_arrival_to_the_end():
    generation = opened(a_request())
    generation.start("boot", 110.0)
    push(generation, 5, now_ms=150.0)
    push(generation, 5, now_ms=180.0)
    finished = generation.finished("aborted", 999.0)
    assert finished.timings == Timings(queue_ms=10.0, prefill_ms=40.0, decode_ms=849.0)
    assert finished.journal_seq == 0


def test_time_while_every_choice_is_preempted_is_spent_in_the_queue():
    generation = opened(a_request(choices=(Choice(index=0), Choice(index=1))))
    generation.start("boot", 110.0)
    first, second = generation.sequences
    first.state = second.state = State.RUNNING
    push(generation, 5, now_ms=150.0)
    first.state = State.WAITING
    generation.scheduled(160.0)
    second.state = State.WAITING
    generation.scheduled(200.0)
    generation.scheduled(220.0)
    second.state = State.RUNNING
    generation.scheduled(300.0)
    timings = generation.finished("complete", 350.0).timings
    assert timings == Timings(queue_ms=110.0, prefill_ms=40.0, decode_ms=100.0)


def test_an_attempt_that_never_started_used_nothing():
    generation = opened(a_request([1, 2, 3]))
    finished = generation.finished("expired", 160.0)
    assert finished.usage == Usage()
    assert finished.timings == Timings(queue_ms=60.0)


def test_an_attempt_that_ended_in_its_prefill_used_its_prompt():
    generation = opened(a_request([1, 2, 3]))
    generation.sequences[0].cached_tokens = 2
    generation.start("boot", 110.0)
    finished = generation.finished("aborted", 130.0)
    assert finished.usage == Usage(prompt_tokens=3, cached_tokens=2)
    assert finished.timings == Timings(queue_ms=10.0, prefill_ms=20.0)
    assert generation.failed("internal", "why").usage == finished.usage


def test_resumed_tokens_are_neither_counted_nor_told_again():
    choice = Choice(index=0, output_ids=letters("abc"), released_chars=3)
    generation = opened(a_request(choices=(choice,), max_tokens=5))
    generation.start("boot", 1.0)
    told = push(generation, *letters("d"))
    assert (told.ids, told.text, told.finish) == (letters("d"), "d", None)
    assert push(generation, *letters("e")).finish == "length"
    assert generation.usage.output_tokens == 2


def test_text_that_the_last_attempt_did_not_release_comes_with_the_first_token():
    choice = Choice(index=0, output_ids=letters("abc"), released_chars=1)
    generation = opened(a_request(choices=(choice,)))
    assert push(generation, *letters("d")).text == "bcd"


@pytest.mark.parametrize(
    ("ids", "sampling", "text", "finish", "stop"),
    [
        (letters("abc"), {"max_tokens": 3}, "bc", "length", None),
        (letters("aEND"), {"stop": ("END",)}, "", "stop", "END"),
        ((*letters("ab"), EOS), {}, "b", "stop", None),
    ],
)
def test_a_choice_that_came_finished_is_only_told(ids, sampling, text, finish, stop):
    choice = Choice(index=0, output_ids=ids, released_chars=1)
    generation = opened(a_request(choices=(choice,), **sampling))
    assert generation.sequences == []
    assert generation.came_finished
    started, told = generation.start("boot", 1.0)
    assert started == Started(boot_id="boot", prompt_tokens=0, cached_tokens=0)
    assert (told.ids, told.text, told.finish, told.stop) == ((), text, finish, stop)
    assert generation.finished("complete", 2.0).usage == Usage()


def test_a_prompt_that_fills_the_context_did_not_come_finished():
    generation = opened(a_request([1] * 5), context_tokens=5)
    assert not generation.came_finished
    assert len(generation.sequences) == 1


def test_ids_after_the_end_of_a_resumed_choice_are_not_read():
    ids = (*letters("a"), EOS, *letters("zzz"))
    generation = opened(a_request(choices=(Choice(index=0, output_ids=ids),)))
    assert generation.start("boot", 1.0)[1].text == "a"


def test_sequences_carry_what_the_scheduler_needs():
    request = a_request(
        [7, 8], attempt=2, request_id="req_1", service_class="batch", deadline_ms=55,
        choices=(Choice(index=0), Choice(index=1, output_ids=(9,), released_chars=0)), max_tokens=4,
    )  # fmt: skip
    first, second = opened(request).sequences
    assert (first.number, second.number) == (1, 2)
    assert first.request == "req_1:2"
    assert (second.tokens, second.num_prompt, second.num_resumed) == ([7, 8, 9], 2, 1)
    assert (second.final_tokens, second.deadline_ms, second.rank) == (6, 55, 2)
    assert second.state is State.WAITING
    assert first.root == second.root
    other = opened(a_request([7, 8], salt=b"other"))
    assert other.sequences[0].root != first.root


BAD = [
    ({"prompt": ()}, "prompt is empty"),  # vllm 7283: an empty prompt killed the engine
    ({"prompt": (1, 300)}, "outside the vocabulary"),
    ({"prompt": (-1,)}, "outside the vocabulary"),
    ({"choices": ()}, "choices must number"),
    ({"choices": [Choice(index=i) for i in range(CHOICES_MAX + 1)]}, "choices must number"),
    ({"choices": [Choice(index=1), Choice(index=1)]}, "indexes must differ"),
    ({"choices": [Choice(index=-1)]}, "indexes must differ"),
    ({"choices": [Choice(index=0, output_ids=(300,))]}, "output id is outside"),
    ({"choices": [Choice(index=0, released_chars=-1)]}, "released_chars is negative"),
    ({"choices": [Choice(index=0, released_chars=1)]}, "beyond the text"),
    ({"choices": [Choice(index=0, output_ids=(5, 5), released_chars=3)]}, "beyond the text"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 65}, "logprobs"),
    ({"stop": ("",)}, "stop string has"),
    ({"stop": ("x" * (STOP_CHARS_MAX + 1),)}, "stop string has"),
    ({"stop": ("x",) * (STOPS_MAX + 1)}, "stop strings"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_request_that_is_wrong_in_itself_is_refused_with_the_reason(changes, message):
    with pytest.raises(BadRequestError, match=message):
        opened(a_request(**changes))


@given(
    st.lists(st.integers(1, 299), min_size=1, max_size=30),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
    st.data(),
)
def test_resumed_anywhere_the_text_goes_on_where_it_was(ids, stops, data):
    sampling = {"stop": tuple(stops), "max_tokens": len(ids)}

    def run(generation, ids):
        told = []
        for token_id in ids:
            if generation.complete:
                break
            told.append(push(generation, token_id))
        return told

    whole = run(opened(a_request(**sampling)), ids)
    cut = data.draw(st.integers(0, len(whole)))
    before = "".join(t.text for t in whole[:cut])
    released = data.draw(st.integers(0, len(before)))
    choice = Choice(index=0, output_ids=tuple(ids[:cut]), released_chars=released)
    resumed = opened(a_request(choices=(choice,), **sampling))
    told = [*resumed.start("boot", 1.0)[1:], *run(resumed, ids[cut : len(whole)])]
    assert before[:released] + "".join(t.text for t in told) == "".join(t.text for t in whole)
    assert [i for t in told for i in t.ids] == ids[cut : len(whole)]
    assert (told[-1].finish, told[-1].stop) == (whole[-1].finish, whole[-1].stop)
