"""The engine's thread and door, on the fake runner: streams, aborts, deadlines, resumption."""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.protocol import Choice, Started, TokenLogprob, Usage
from tests.support.engine_listener import (
    Gate,
    Listener,
    an_engine,
    assert_right,
    submitted,
    wait_until,
)
from tests.support.engine_requests import EOS, FakeText, a_request

TEXT = FakeText()


def test_one_request_streams_its_answer_and_its_totals():
    request = a_request(range(1, 11), max_tokens=6, temperature=1.0)
    with an_engine() as engine:
        listener = submitted(engine, request)
        last = listener.end()
    assert listener.started == Started(boot_id="boot_1", prompt_tokens=10, cached_tokens=0)
    assert (last.cause, last.journal_seq) == ("complete", 0)
    assert last.usage == Usage(prompt_tokens=10, output_tokens=6)
    assert last.timings.prefill_ms >= 0
    assert last.timings.decode_ms >= 0
    assert_right(listener, request)


def test_logprobs_reach_the_stream_where_they_were_asked_for():
    with an_engine() as engine:
        listener = submitted(engine, a_request(max_tokens=2, logprobs=2))
        listener.end()
    for tokens in listener.tokens():
        [logprob] = tokens.logprobs
        assert isinstance(logprob, TokenLogprob)
        assert (logprob.id, len(logprob.top)) == (tokens.ids[0], 2)


def test_a_repeated_prompt_is_read_from_the_cache_and_counted():
    with an_engine() as engine:
        submitted(engine, a_request(range(1, 17), max_tokens=1)).end()
        again = submitted(engine, a_request(range(1, 17), max_tokens=1))
        assert again.end().usage == Usage(prompt_tokens=16, cached_tokens=12, output_tokens=1)
        assert again.started.cached_tokens == 12
        other = submitted(engine, a_request(range(1, 17), max_tokens=1, salt=b"other"))
        assert other.end().usage.cached_tokens == 0


def test_choices_stream_side_by_side_and_the_prompt_is_counted_once():
    choices = tuple(Choice(index=i) for i in range(3))
    request = a_request(range(1, 10), choices=choices, max_tokens=5, temperature=1.0)
    with an_engine() as engine:
        listener = submitted(engine, request)
        usage = listener.end().usage
    for choice in range(3):
        assert_right(listener, request, choice)
    assert usage.prompt_tokens == 9
    assert usage.output_tokens == sum(len(listener.ids(choice)) for choice in range(3))


def test_many_threads_submit_and_abort_at_random_and_nothing_is_lost_or_left():
    dice = random.Random(5)
    plans = [
        [
            (
                a_request(
                    [dice.randrange(1, 4) for _ in range(dice.randrange(1, 40))],
                    max_tokens=dice.randrange(1, 20),
                    temperature=dice.choice([0.0, 1.0]),
                    service_class=dice.choice(["interactive", "standard", "batch"]),
                    choices=tuple(Choice(index=i) for i in range(dice.choice([1, 1, 1, 3]))),
                    stop=dice.choice([(), ("e",), ("한", "zz")]),
                ),
                dice.choice([None, None, 0.0, dice.random() / 50]),
            )
            for _ in range(25)
        ]
        for _ in range(4)
    ]
    results = []

    def client(engine, plan):
        for request, abort_after in plan:
            listener = submitted(engine, request)
            if abort_after is not None:
                time.sleep(abort_after)
                engine.abort(request.request_id, 1)
            results.append((request, listener))

    with an_engine(kv_blocks=30) as engine:
        threads = [threading.Thread(target=client, args=(engine, plan)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends = [(listener.end(), request, listener) for request, listener in results]
        assert engine.load().running == engine.load().waiting == 0
    assert len(ends) == 100
    for last, request, listener in ends:
        assert last.cause in ("complete", "aborted")
        for choice in request.choices:
            if last.cause == "complete" or listener.tokens(choice.index):
                assert_right(listener, request, choice.index)


# Aborts


def test_an_abort_while_waiting_ends_without_a_start():
    gate = Gate()
    with an_engine(before=gate, max_sequences=1) as engine:
        running = submitted(engine, a_request(max_tokens=2))
        gate.wait_for_step()
        waiting = submitted(engine, a_request())
        assert engine.abort(waiting_id(engine, 1), 1)
        gate.open(for_good=True)
        assert (waiting.end().cause, waiting.end().usage) == ("aborted", Usage())
        assert waiting.started is None
        assert running.end().cause == "complete"


def waiting_id(engine, index):
    return list(engine._accepted.values())[index].generation.request.request_id


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_takes_effect_within_two_steps_in_every_state(steps):
    # Four steps of prefill, then decodes: aborted before the first, in the middle, at the end.
    gate = Gate()
    request = a_request(range(1, 60), max_tokens=50)
    with an_engine(before=gate) as engine:
        listener = submitted(engine, request)
        for _ in range(steps):
            gate.wait_for_step()
            gate.open()
        gate.wait_for_step()
        assert engine.abort(request.request_id, 1)
        gate.open()
        last = listener.end()
        assert len(gate.plans) == steps + 1
        assert (last.cause, last.usage.prompt_tokens) == ("aborted", 59)
        assert not engine.abort(request.request_id, 1)
        # What it computed may be hit; what it did not, not.
        gate.open(for_good=True)
        again = submitted(engine, a_request(range(1, 60), max_tokens=50))
        again.end()
        assert_right(again, request)


def test_an_abort_in_the_inbox_and_one_of_nobody():
    with an_engine(start=False) as engine:
        request = a_request()
        listener = submitted(engine, request)
        assert engine.abort(request.request_id, 1)
        assert not engine.abort(request.request_id, 2)
        assert not engine.abort("nobody", 1)
        engine.start()
        assert listener.end().cause == "aborted"
        assert listener.started is None


# Deadlines


def test_a_deadline_that_has_passed_ends_the_attempt_before_it_starts():
    with an_engine() as engine:
        listener = submitted(engine, a_request(deadline_ms=1))
        assert listener.end().cause == "expired"
        assert listener.started is None


def test_a_running_attempt_ends_when_its_deadline_comes():
    now = [1000]
    gate = Gate()
    with an_engine(before=gate, wall_ms=lambda: now[0]) as engine:
        listener = submitted(engine, a_request(max_tokens=100, deadline_ms=1001))
        gate.wait_for_step()
        now[0] = 1001
        gate.open(for_good=True)
        last = listener.end()
    assert (last.cause, last.usage.output_tokens) == ("expired", 1)


# Resumption


def run_whole(engine, request):
    listener = submitted(engine, request)
    listener.end()
    return listener


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([(), ("한",), ("e", "the end"), ("\ufffd",), ("국어 🤦", "zzzz")]),
    st.integers(1, 3),
)
@settings(max_examples=15)
def test_resumed_after_every_token_an_answer_is_what_it_would_have_been(seed, stop, number):
    # Korean, emoji and broken bytes, one token at a time; some answers stop early.
    sampling = {"max_tokens": 14, "temperature": 1.0, "seed": seed, "stop": stop}
    prompt = [1 + seed % 200, 2, 3, 4, 5]
    with an_engine(kv_blocks=128, max_batched_tokens=8) as engine:
        indexes = range(number)
        request = a_request(prompt, choices=[Choice(index=i) for i in indexes], **sampling)
        whole = run_whole(engine, request)
        longest = max(len(whole.ids(i)) for i in indexes)
        for cut in range(longest + 1):
            before = [whole.tokens(i)[:cut] for i in indexes]
            choices = [
                Choice(
                    index=i,
                    output_ids=tuple(x for t in before[i] for x in t.ids),
                    released_chars=sum(len(t.text) for t in before[i]),
                )
                for i in indexes
            ]
            resumed = run_whole(engine, a_request(prompt, choices=choices, attempt=2, **sampling))
            for i in indexes:
                text = "".join(t.text for t in before[i])
                assert [x for t in before[i] for x in t.ids] + resumed.ids(i) == whole.ids(i)
                assert text + resumed.text(i) == whole.text(i)
                ends = [(x.tokens(i)[-1].finish, x.tokens(i)[-1].stop) for x in (whole, resumed)]
                assert ends[0] == ends[1]
            produced = sum(len(whole.ids(i)) - len(whole.ids(i)[:cut]) for i in indexes)
            assert resumed.end().usage.output_tokens == produced


def test_an_attempt_that_came_finished_is_told_so_at_once_even_to_a_busy_engine():
    gate = Gate()
    with an_engine(before=gate) as engine:
        submitted(engine, a_request(max_tokens=3))
        gate.wait_for_step()
        choice = Choice(index=0, output_ids=(5, EOS))
        done = submitted(engine, a_request(choices=(choice,)))
        gate.open()
        last = done.end()
        gate.open(for_good=True)
    assert (last.cause, last.usage) == ("complete", Usage())
    assert (done.ids(), done.text()) == ([], TEXT.decode([5]))


def test_an_attempt_that_came_finished_can_be_aborted_before_it_is_told():
    with an_engine(start=False) as engine:
        request = a_request(choices=(Choice(index=0, output_ids=(EOS,)),))
        done = submitted(engine, request)
        engine.abort(request.request_id, 1)
        engine.start()
        assert done.end().cause == "aborted"


# The door


def test_the_door_refuses_in_its_order():
    gate = Gate()
    with an_engine(before=gate, waiting_tokens_max=20, max_sequences=1) as engine:
        emit = Listener().emit
        assert engine.submit(a_request(version="v2"), emit).reason == "wrong_version"
        assert engine.submit(a_request([1] * 200), emit).fits_never
        running = a_request(max_tokens=3)
        submitted(engine, running)
        assert engine.submit(running, emit).reason == "duplicate"
        gate.wait_for_step()
        submitted(engine, a_request([2] * 19))
        assert engine.submit(a_request([3] * 2), emit).reason == "full"
        assert engine.submit(a_request([3]), emit) is None
        engine.drain()
        assert engine.load().draining
        assert engine.submit(a_request(), emit).reason == "draining"
        gate.open(for_good=True)


def test_the_waiting_bound_opens_again_as_the_list_empties():
    with an_engine(waiting_tokens_max=20) as engine:
        for i in range(20):
            submitted(engine, a_request([i + 1] * 19, max_tokens=1)).end()


def test_the_inbox_is_bounded():
    with an_engine(start=False) as engine:
        done = a_request(choices=(Choice(index=0, output_ids=(EOS,)),))
        for i in range(1024):
            emit = Listener().emit
            assert engine.submit(a_request((), request_id=f"bad{i}"), emit) is None
        assert engine.submit(done, Listener().emit).reason == "full"
        assert engine.submit(a_request(()), Listener().emit).reason == "full"


def test_load_counts_what_was_accepted_and_not_yet_looked_at():
    gate = Gate()
    with an_engine(before=gate, max_sequences=1) as engine:
        idle = engine.load()
        assert (idle.kv_blocks_total, idle.kv_blocks_free, idle.kv_blocks_in_use) == (64, 64, 0)
        assert idle.integrity
        assert idle.healthy
        submitted(engine, a_request([1] * 9, max_tokens=2))
        gate.wait_for_step()
        submitted(engine, a_request([2] * 9, max_tokens=2))
        busy = engine.load()
        assert (busy.running, busy.waiting, busy.steps) == (1, 1, 0)
        assert (busy.kv_blocks_in_use, busy.kv_blocks_free) == (3, 64 - 3 - 3)
        assert engine.submit(a_request([3] * 9), Listener().emit) is None
        gate.open()
        gate.wait_for_step()
        assert engine.load().waiting == 2
        gate.open(for_good=True)


def test_totals_add_up_and_progress_tells_of_those_that_started():
    gate = Gate()
    with an_engine(before=gate, max_sequences=1) as engine:
        first, second = a_request([1] * 5, max_tokens=3), a_request([2] * 5, max_tokens=1)
        listeners = [submitted(engine, first), submitted(engine, second)]
        gate.wait_for_step()
        gate.open()
        gate.wait_for_step()
        usage = Usage(prompt_tokens=5, output_tokens=1)
        assert engine.progress() == [(first.request_id, 1, usage)]
        gate.open(for_good=True)
        for listener in listeners:
            listener.end()
        wait_until(lambda: engine.load().running == 0)
        load = engine.load()
        assert (load.steps, load.output_tokens, load.computed_tokens) == (4, 4, 5 + 2 + 5)
        assert load.kv_blocks_cached > 0
        assert engine.progress() == []


def test_an_idle_engine_sleeps_and_wakes():
    with an_engine() as engine:
        submitted(engine, a_request()).end()
        time.sleep(0.3)
        used = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.1
        submitted(engine, a_request()).end()
