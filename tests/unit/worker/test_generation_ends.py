"""What ends an answer, what does not yet, and what is wrong with how one is asked for."""

from itertools import count

import pytest

from core.protocol import Choice, Prompted, TokenLogprob
from tests.support.engine_requests import EOS, FakeText, a_request
from worker.faults import BAD_WORD_TOKENS_MAX, IDS_MAX, STOPS_MAX, BadRequestError
from worker.generation import PROMPTED_MAX, open_generation
from worker.step import Sampled

TEXT = FakeText()


def letters(text):
    return tuple(1 + byte for byte in text.encode())


def opened(request, grammar=None):
    return open_generation(
        request, TEXT, context_tokens=10_000, numbers=count(1), arrived_ms=0.0, grammar=grammar
    )


def push(generation, token_id, *, ends=False):
    [sequence] = generation.sequences
    sequence.tokens.append(token_id)
    return generation.accept(sequence, Sampled(token_id=token_id, ends=ends), 1.0)


def run(generation, ids):
    """Text, number of tokens and how it finished."""
    text = ""
    for number, token_id in enumerate(ids, 1):
        told = push(generation, token_id)
        text += told.text
        if told.finish:
            return text, number, told.finish, told.stop
    return text, len(ids), None, None


def test_a_stop_id_ends_a_choice_as_an_end_does_and_its_text_is_left_out():
    [stop] = letters("!")
    generation = opened(a_request(stop_ids=(stop,), max_tokens=9))
    assert run(generation, letters("ab!c")) == ("ab", 3, "stop", None)


def test_ignoring_the_end_does_not_ignore_a_stop_id():
    generation = opened(a_request(stop_ids=(EOS, *letters("!")), ignore_eos=True, max_tokens=9))
    assert run(generation, (*letters("ab"), EOS)) == ("ab", 3, "stop", None)


# vllm #21987, PR 5849, PR 46243, #15967: min_tokens ignored by stop strings, by a second end,
# and off by one.
def test_min_tokens_hold_off_stop_strings_and_ends():
    asked = {"min_tokens": 4, "stop": ("b",), "stop_ids": letters("!"), "max_tokens": 9}
    assert run(opened(a_request(**asked)), letters("ababab")) == ("aba", 4, "stop", "b")
    assert run(opened(a_request(**asked)), letters("abaa!")) == ("abaa", 5, "stop", None)
    assert run(opened(a_request(**asked)), letters("!!!!!")) == ("!!!!", 5, "stop", None)


def test_a_resumed_choice_counts_its_tokens_towards_min_tokens():
    choice = Choice(index=0, output_ids=letters("ab!"), released_chars=1)
    request = a_request(
        choices=(choice,), min_tokens=4, stop=("b",), stop_ids=letters("!"), max_tokens=9
    )
    assert run(opened(request), letters("b")) == ("b!", 1, "stop", "b")


def test_max_tokens_end_a_choice_even_at_min_tokens():
    generation = opened(a_request(min_tokens=2, max_tokens=2))
    assert run(generation, letters("ab")) == ("ab", 2, "length", None)


@pytest.mark.parametrize(("max_tokens", "stop"), [(5, ()), (1, ()), (5, ("a",))])
def test_a_complete_grammar_is_a_stop(max_tokens, stop):
    generation = opened(a_request(max_tokens=max_tokens, stop=stop))
    told = push(generation, *letters("a"), ends=True)
    assert (told.text, told.finish) == ("" if stop else "a", "stop")


class Follows:
    """A grammar of which it is known what some ids are to it."""

    def __init__(self, answer):
        self.answer = answer

    def follows(self, ids, /):
        return self.answer


@pytest.mark.parametrize(("complete", "finish"), [(True, "stop"), (False, None)])
def test_a_resumed_choice_whose_grammar_was_complete_came_finished(complete, finish):
    choice = Choice(index=0, output_ids=letters("ab"), released_chars=2)
    generation = opened(a_request(choices=(choice,)), grammar=Follows(complete))
    assert [told.finish for told in generation.start("boot", 1.0)[1:]] == [finish] * complete
    assert generation.complete is complete


def test_a_resumed_choice_that_breaks_its_grammar_is_refused():
    choice = Choice(index=0, output_ids=letters("ab"), released_chars=2)
    with pytest.raises(BadRequestError, match="output_ids break the grammar"):
        opened(a_request(choices=(choice,)), grammar=Follows(None))


def test_prompt_logprobs_are_told_in_frames_of_bounded_size():
    generation = opened(a_request(range(1, 50), prompt_logprobs=1))
    told = tuple(TokenLogprob(id=i % 300, logprob=-1.0) for i in range(PROMPTED_MAX + 2))
    assert generation.prompted(3, told) == [
        Prompted(start=3, logprobs=told[:PROMPTED_MAX]),
        Prompted(start=3 + PROMPTED_MAX, logprobs=told[PROMPTED_MAX:]),
    ]
    assert generation.prompted(3, ()) == []


def test_the_first_choice_tells_the_prompt_unless_an_answer_is_resumed():
    fresh = (Choice(index=0), Choice(index=1))
    resumed = (Choice(index=0), Choice(index=1, output_ids=(5,)))
    for choices, asked, told in (
        (fresh, 0, [1, None]),
        (fresh, None, [None, None]),
        (resumed, 0, [None, None]),
    ):
        generation = opened(a_request(choices=choices, prompt_logprobs=asked))
        assert [sequence.untold for sequence in generation.sequences] == told


def test_a_token_that_was_not_drawn_says_whose_fault_that_is():
    generation = opened(a_request())
    ours = generation.undrawn(Sampled(token_id=-1, fault="no numbers"))
    theirs = generation.undrawn(Sampled(token_id=-1, fault="nothing left", unanswerable=True))
    assert (ours.code, ours.message, ours.retryable) == ("internal", "no numbers", True)
    assert (theirs.code, theirs.message, theirs.retryable) == ("bad_request", "nothing left", False)


BAD = [
    ({"min_tokens": -1}, "min_tokens must not"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is over max_tokens"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": float("nan")}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 65}, "prompt_logprobs"),
    ({"logit_bias": ((300, 1.0),)}, "logit_bias id is outside"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias id is outside"),
    ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias has an id twice"),
    ({"logit_bias": ((5, 100.5),)}, "a logit_bias must be"),
    ({"logit_bias": ((5, float("nan")),)}, "a logit_bias must be"),
    ({"logit_bias": tuple((i, 1.0) for i in range(IDS_MAX + 1))}, "logit_bias has at most"),
    ({"allowed_ids": (5, 300)}, "allowed id is outside"),
    ({"stop_ids": (300,)}, "stop id is outside"),
    ({"stop_ids": (1,) * (STOPS_MAX + 1)}, "stop ids"),
    ({"bad_words": ((),)}, "a bad word has"),
    ({"bad_words": ((1,) * (BAD_WORD_TOKENS_MAX + 1),)}, "a bad word has"),
    ({"bad_words": ((1, 300),)}, "id of a bad word is outside"),
    ({"bad_words": ((1,),) * (IDS_MAX + 1)}, "bad words"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_sampling_that_contradicts_itself_is_refused_with_the_reason(changes, message):
    with pytest.raises(BadRequestError, match=message):
        opened(a_request(**changes))


def test_every_bound_may_be_reached():
    opened(
        a_request(
            min_tokens=8,
            max_tokens=8,
            min_p=1.0,
            repetition_penalty=0.01,
            frequency_penalty=-2.0,
            presence_penalty=2.0,
            logprobs=64,
            prompt_logprobs=64,
            logit_bias=((0, -100.0), (299, 100.0)),
            allowed_ids=(0, 299),
            stop_ids=tuple(range(STOPS_MAX)),
            bad_words=((1,) * BAD_WORD_TOKENS_MAX,),
        )
    )
