"""The coarse prefix chain and the index of who has seen what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prefix import CHUNK_TOKENS, chunk_sizes, prefix_hashes
from core.prefix_index import PrefixIndex, PrefixRules
from core.tickets import PREFIX_HASHES_MAX

SALT = b"salt"
ids = st.lists(st.integers(0, 2**31), max_size=700)


@pytest.mark.parametrize("context_tokens", [1, 2_048, 4_096, 8_192, 131_072, 1_048_576, 10**8])
def test_at_most_so_many_chunks_cover_the_context(context_tokens):
    sizes = list(chunk_sizes(context_tokens))
    assert len(sizes) <= PREFIX_HASHES_MAX
    assert sum(sizes) >= context_tokens
    assert sizes == sorted(sizes)
    assert sizes[0] == CHUNK_TOKENS


@given(shared=ids, left=ids, right=ids)
def test_prompts_share_exactly_the_hashes_of_what_they_share(shared, left, right):
    one = prefix_hashes(shared + left, salt=SALT, context_tokens=8_192)
    two = prefix_hashes(shared + right, salt=SALT, context_tokens=8_192)
    common = prefix_hashes(shared, salt=SALT, context_tokens=8_192)
    assert one[: len(common)] == two[: len(common)] == common
    assert len(one) == (len(shared) + len(left)) // CHUNK_TOKENS
    assert all(len(name) == 16 for name in one)
    assert len(set(one)) == len(one)


@given(prompt=st.lists(st.integers(0, 2**31), min_size=CHUNK_TOKENS, max_size=140))
def test_another_salt_or_another_beginning_shares_nothing(prompt):
    mine = prefix_hashes(prompt, salt=SALT, context_tokens=8_192)
    theirs = prefix_hashes(prompt, salt=b"other", context_tokens=8_192)
    changed = prefix_hashes([prompt[0] + 1, *prompt[1:]], salt=SALT, context_tokens=8_192)
    assert not set(mine) & set(theirs)
    assert not set(mine) & set(changed)


def test_a_long_context_has_larger_chunks_further_in():
    prompt = range(131_072)
    hashes = prefix_hashes(prompt, salt=SALT, context_tokens=131_072)
    assert 48 <= len(hashes) <= PREFIX_HASHES_MAX
    assert len(prefix_hashes(prompt[:128], salt=SALT, context_tokens=131_072)) == 2


def test_a_prompt_beyond_the_context_has_the_hashes_of_the_context():
    beyond = prefix_hashes(range(10_000), salt=SALT, context_tokens=1)
    assert len(beyond) == PREFIX_HASHES_MAX


def test_the_chain_is_the_same_everywhere():
    assert prefix_hashes(range(64), salt=SALT, context_tokens=2_048) == ("05f34fa7de717388",)


def test_the_index_knows_how_deep_each_replica_has_seen():
    index = PrefixIndex(PrefixRules())
    index.record(("a", "b", "c"), 1)
    index.record(("a", "b"), 2)
    assert index.matched(("a", "b", "c", "d")) == {1: 3, 2: 2}
    assert index.matched(("x",)) == {}
    assert index.matched(()) == {}


def test_the_index_forgets_the_least_recently_used_hash_and_the_oldest_owner():
    index = PrefixIndex(PrefixRules(hashes_max=3, owners_max=2))
    index.record(("a", "b", "c"), 1)
    index.record(("a",), 1)
    index.record(("d",), 1)
    assert list(index.owners) == ["c", "a", "d"]
    for number in (2, 3):
        index.record(("a",), number)
    assert index.owners["a"] == [2, 3]
    index.record(("a",), 2)
    assert index.owners["a"] == [3, 2]


def test_chunk_sizes_are_worked_out_once_for_each_context() -> None:
    assert chunk_sizes(12_345) is chunk_sizes(12_345)
