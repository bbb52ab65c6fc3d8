"""A course: forward only, bounded, and what is told at its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.route_table import CAUSES, FallbackCause
from gateway.fallback import cause_of
from gateway.relay.course import TARGETS_MAX, Course
from gateway.route_index import Option, Route, Spare
from gateway.route_plan import Facts, Plan, plan
from tests.unit.gateway.test_route_plan import an_option, seeing


def a_refusal(code: Code) -> Refusal:
    return Refusal(code=code, message=code.value)


def a_course(
    *spares: tuple[tuple[FallbackCause, ...], Option], first: Option | None = None
) -> Course:
    kept = tuple(Spare(on=on, option=option) for on, option in spares)
    made = plan(
        Route(name="m", options=(first or an_option("first"),), spares=kept),
        Facts(prompt_tokens=5),
        0,
    )
    assert isinstance(made, Plan)
    return Course(made)


def fail(course: Course, code: Code, *, is_late: bool = False) -> str | None:
    refusal = a_refusal(code)
    course.fail(refusal, cause_of(refusal), is_late=is_late)
    return None if course.step is None else course.step.option.name


def test_a_course_goes_on_for_the_causes_that_the_table_names() -> None:
    # GoModel #605: which failures make it try the next one is for an operator to say.
    spares = [(("capacity",), an_option("a")), (("error", "timeout"), an_option("b"))]
    assert fail(a_course(*spares), Code.OVERLOADED) == "a"
    assert fail(a_course(*spares), Code.INTERNAL) == "b"
    assert fail(a_course(*spares), Code.CONTEXT_LENGTH) is None
    course, could_go_on = a_course(*spares), []
    could_go_on.append(course.may_go_on)
    assert fail(course, Code.TIMEOUT) == "b"
    could_go_on.append(course.may_go_on)
    assert could_go_on == [True, False]
    assert fail(course, Code.OVERLOADED) is None  # `a` lies behind
    assert (course.fallbacks, course.name) == (1, "m")
    assert course.told.code is Code.OVERLOADED


def test_nothing_is_tried_elsewhere_for_the_callers_fault_or_when_time_is_up() -> None:
    everything = (CAUSES, an_option("a"))
    assert fail(a_course(everything), Code.BAD_REQUEST) is None
    assert fail(a_course(everything), Code.OVERLOADED, is_late=True) is None
    assert fail(a_course(everything), Code.OVERLOADED) == "a"


def test_a_target_that_cannot_be_asked_is_passed_over_for_the_cause_that_led_there() -> None:
    course = a_course((("capacity",), an_option("a")), (("capacity",), an_option("b")))
    assert fail(course, Code.OVERLOADED) == "a"
    course.skip(a_refusal(Code.BAD_REQUEST), None, is_late=False)
    assert course.step is not None
    assert course.step.option.name == "b"
    # The caller asked for nothing wrong: the first target would have taken it.
    assert fail(course, Code.INTERNAL) is None
    assert course.told.code is Code.OVERLOADED
    first = a_course((CAUSES, an_option("a")))
    first.skip(a_refusal(Code.BAD_REQUEST), None, is_late=False)
    assert first.step is None
    assert first.told.code is Code.BAD_REQUEST


def test_a_prompt_too_long_for_all_begins_with_a_fallback_or_ends_at_once() -> None:
    short = an_option("short", prompt_tokens_max=4)
    course = a_course((("context_window",), an_option("long")), first=short)
    assert course.step is not None
    assert (course.step.option.name, course.fallbacks) == ("long", 1)
    ended = a_course((("error",), an_option("long")), first=short)
    assert ended.step is None
    assert not ended.may_go_on
    assert (ended.told.code, ended.fallbacks) == (Code.CONTEXT_LENGTH, 0)
    assert ended.first_token_ms == 0


def test_images_that_no_target_takes_begin_with_a_fallback_or_end_at_once() -> None:
    facts = Facts(images=True, image="input[0]")
    for on, name in (("images", "theirs"), ("capacity", None)):
        spare = Spare(on=(on,), option=seeing("theirs"))
        route = Route(name="m", options=(an_option("ours"),), spares=(spare,))
        made = plan(route, facts, 0)
        assert isinstance(made, Plan)
        course = Course(made)
        assert (course.step and course.step.option.name) == name
        assert (course.told.code, course.told.param) == (Code.UNSUPPORTED, "input[0]")


def slow(name: str) -> Option:
    option = an_option(name)
    return Option(
        target=type(option.target)(deployment=name, first_token_ms=50), model=option.model
    )


def test_a_target_is_waited_for_without_bound_where_nobody_else_would_be_asked() -> None:
    assert a_course((("error",), an_option("a")), first=slow("s")).first_token_ms == 0
    course = a_course((("timeout",), slow("a")), first=slow("s"))
    assert course.first_token_ms == 50
    assert fail(course, Code.TIMEOUT) == "a"
    assert course.first_token_ms == 0


@given(st.lists(st.sampled_from(CAUSES), min_size=1, max_size=5, unique=True))
def test_a_request_tries_so_many_targets_at_most(causes: list[FallbackCause]) -> None:
    spares = [(tuple(causes), an_option(f"s{at}")) for at in range(TARGETS_MAX + 3)]
    course = a_course(*spares, first=slow("first"))
    tried = 1
    while course.step is not None:
        course.fail(a_refusal(Code.OVERLOADED), causes[0], is_late=False)
        tried += course.step is not None
        if tried == TARGETS_MAX:
            assert not course.may_go_on
    assert tried == TARGETS_MAX
    assert not a_course(first=slow("alone")).may_go_on
    with pytest.raises(AssertionError):
        course.fail(a_refusal(Code.OVERLOADED), causes[0], is_late=False)
