"""Which requests are the same to a replica that dies of one, and what a fingerprint tells."""

from types import SimpleNamespace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Grammar, Sampling
from gateway.relay.fingerprint import fingerprint

KEY = b"a key of the fleet's"


def a_job(*, tenant="ten_a", version="v1", prompt_ids=(1, 2, 3), choices=1, **sampling):
    asked = Sampling(**({"seed": 1, "max_tokens": 10} | sampling))
    return SimpleNamespace(
        arm=SimpleNamespace(tenant=tenant),
        model=SimpleNamespace(version=version),
        choices=choices,
        sampling=asked,
        prompt_ids=prompt_ids,
    )


def test_the_dice_and_the_length_make_no_other_request_of_it():
    assert fingerprint(KEY, a_job()) == fingerprint(KEY, a_job(seed=9, max_tokens=99, min_tokens=2))


def test_whatever_else_differs_does():
    others = [
        a_job(tenant="ten_b"),
        a_job(version="v2"),
        a_job(prompt_ids=(1, 2, 4)),
        a_job(prompt_ids=(1, 2)),
        a_job(choices=2),
        a_job(temperature=0.0),
        a_job(stop=("x",)),
        a_job(grammar=Grammar(kind="json_object")),
    ]
    told = {fingerprint(KEY, job) for job in (a_job(), *others)}
    assert len(told) == 1 + len(others)
    assert fingerprint(b"another fleet's", a_job()) not in told


@given(st.lists(st.integers(0, 100_000), min_size=1).map(tuple))
def test_it_is_short_and_tells_nothing_of_the_prompt(prompt_ids):
    told = fingerprint(KEY, a_job(prompt_ids=prompt_ids))
    assert len(told) == 32
    assert msgspec.json.encode(prompt_ids).decode() not in told
