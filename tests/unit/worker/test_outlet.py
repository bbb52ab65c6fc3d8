"""One last word, whoever says it first."""

import threading

import pytest

from core.protocol import Failed, Finished, Started, Timings, Usage
from worker.outlet import Outlet

STARTED = Started(boot_id="b", prompt_tokens=1, cached_tokens=0)
FINISHED = Finished(cause="complete", usage=Usage(), timings=Timings(), journal_seq=0)
FAILED = Failed(code="internal", message="", retryable=True)


def test_nothing_follows_a_last_word_from_either_side():
    for first in ("engine", "other"):
        heard = []
        outlet = Outlet(heard.extend)
        outlet([STARTED])
        if first == "engine":
            outlet([FINISHED])
        else:
            assert outlet.cut(FAILED, 1)
        outlet([STARTED, FINISHED])
        assert outlet.cut(FAILED, 1)
        assert heard == [STARTED, FINISHED if first == "engine" else FAILED]


def test_nothing_to_tell_is_told_to_nobody():
    heard = []
    outlet = Outlet(heard.append)
    outlet([])
    outlet([FINISHED])
    assert heard == [[FINISHED]]


def test_a_last_word_that_raised_was_the_last():
    def broken(events):
        raise OSError

    outlet = Outlet(broken)
    for _ in range(2):
        with pytest.raises(OSError):  # noqa: PT011 - its only word
            outlet([STARTED])
    with pytest.raises(OSError):  # noqa: PT011 - its only word
        outlet([FINISHED])
    outlet([FINISHED])
    assert outlet.cut(FAILED, 1)


def test_an_emit_that_hangs_is_not_waited_for():
    entered, leave = threading.Event(), threading.Event()

    def hanging(events):
        entered.set()
        leave.wait(20)

    outlet = Outlet(hanging)
    thread = threading.Thread(target=outlet, args=([STARTED],))
    thread.start()
    entered.wait(20)
    assert not outlet.cut(FAILED, 0.01)
    leave.set()
    thread.join()
    assert outlet.cut(FAILED, 1)
