"""A binding: the first draw, while it is allowed and asked for."""

from core.bindings import BindingRules, Bindings


def test_a_conversation_stays_until_its_target_goes_or_nobody_asks() -> None:
    bindings = Bindings(BindingRules(idle_ms=10))
    assert bindings.bind("c", "a", {"a", "b"}, 0) == "a"
    assert bindings.bind("c", "b", {"a", "b"}, 9) == "a"
    assert bindings.bind("c", "b", {"a", "b"}, 18) == "a"  # each request keeps it alive
    assert bindings.bind("c", "b", {"a", "b"}, 28) == "b"
    assert bindings.bind("c", "a", {"a"}, 29) == "a"
    assert bindings.bind("d", "b", {"a", "b"}, 29) == "b"
