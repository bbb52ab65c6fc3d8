"""The memory of served prefixes: longest match, salted apart, and bounded."""

from core.prefix import prefix_hashes
from gateway.prefixes import PrefixMemory


def test_the_longest_seen_prefix_counts() -> None:
    memory = PrefixMemory()
    long = prefix_hashes(range(1_000), salt=b"a", context_tokens=2_048)
    other = prefix_hashes([*range(500), *range(5_000, 5_500)], salt=b"a", context_tokens=2_048)
    assert memory.cached_tokens(long, 2_048) == 0
    memory.remember(long)
    assert 900 < memory.cached_tokens(long, 2_048) <= 1_000
    assert 400 < memory.cached_tokens(other, 2_048) <= 500
    foreign = prefix_hashes(range(1_000), salt=b"b", context_tokens=2_048)
    assert memory.cached_tokens(foreign, 2_048) == 0
    assert memory.cached_tokens((), 2_048) == 0


def test_the_oldest_is_forgotten() -> None:
    memory = PrefixMemory(hashes_max=3)
    memory.remember(("a", "b"))
    memory.remember(("c",))
    memory.remember(("a",))  # seen again: newest
    memory.remember(("d",))
    assert memory.cached_tokens(("a",), 2_048) > 0
    assert memory.cached_tokens(("b",), 2_048) == 0
