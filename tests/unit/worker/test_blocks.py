"""The block pool: counts, chains, eviction order, and a model of all three."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.blocks import BlockPool
from worker.prefix import chain_root

ROOT = chain_root("v1", "", b"tenant a")
OTHER = chain_root("v1", "", b"tenant b")


def found(pool, root, tokens, limit):
    """The device blocks of the longest prefix."""
    return [content.device[0] for content in pool.match(pool.chain(root, tokens), limit)]


def fill(pool, tokens, root=ROOT):
    """Hold blocks for these tokens and publish the full ones; returns the table."""
    chain = pool.chain(root, tokens)
    hits = pool.match(chain, len(tokens))
    table = pool.hold(hits)
    table += pool.take(pool.blocks_for(len(tokens)) - len(hits))
    pool.publish(chain, table, range(len(hits), len(tokens) // pool.block_tokens))
    return table


def assert_whole(pool, *tables):
    assert pool.problems(tables) == []
    assert pool.num_available + pool.num_in_use == pool.num_blocks
    assert pool.num_cached <= pool.num_available


def test_a_prefix_is_hit_up_to_its_full_blocks():
    pool = BlockPool(8, 4)
    table = fill(pool, range(10))
    assert found(pool, ROOT, [*range(10), 99], 11) == table[:2]
    assert found(pool, ROOT, [*range(5), 99, 98, 97], 8) == table[:1]
    assert_whole(pool, table)


def test_a_limit_inside_a_block_excludes_it():
    pool = BlockPool(8, 4)
    table = fill(pool, range(8))
    assert found(pool, ROOT, range(8), 7) == table[:1]
    assert found(pool, ROOT, range(8), 8) == table


def test_another_tenant_and_another_version_hit_nothing():
    pool = BlockPool(8, 4)
    fill(pool, range(8))
    assert found(pool, OTHER, range(8), 8) == []
    assert found(pool, chain_root("v2", "", b"tenant a"), range(8), 8) == []


@given(
    a=st.tuples(st.text(), st.text(), st.binary()), b=st.tuples(st.text(), st.text(), st.binary())
)
def test_different_versions_adapters_and_salts_never_share_a_root(a, b):
    assert (chain_root(*a) == chain_root(*b)) == (a == b)


def test_roots_cannot_be_made_equal_by_moving_bytes_between_their_parts():
    triples = [("ab", "c", b"d"), ("a", "bc", b"d"), ("a", "b", b"cd"), ("", "abc", b"d")]
    triples += [("abc", "", b"d"), ("abc", "d", b""), ("", "", b"abcd")]
    assert len({chain_root(*triple) for triple in triples}) == len(triples)


def test_the_same_tokens_after_another_parent_are_another_content():
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 9, 9])
    fill(pool, [3, 4, 9, 9])
    assert found(pool, ROOT, [1, 2, 9, 9], 4) == [0, 1]
    assert found(pool, ROOT, [3, 4, 9, 9], 4) == [2, 3]


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(3, 2)
    table = fill(pool, [1, 2, 3])  # one full block, one not
    pool.release(table)
    assert pool.num_cached == 1
    assert table[0] not in pool.take(2)
    assert pool.take(1) == [table[0]]
    assert found(pool, ROOT, [1, 2], 2) == []


def test_tails_are_evicted_before_heads_and_old_before_new():
    pool = BlockPool(4, 2)
    old, new = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert [pool.take(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_hit_moves_a_cached_prefix_to_the_end_of_the_line():
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(first)
    pool.release(second)
    pool.share(first)
    assert pool.num_cached == 2
    pool.release(first)
    assert pool.take(2) == [second[1], second[0]]


def test_equal_contents_are_kept_in_both_blocks_until_each_is_evicted():
    # Both were computed in one step: neither could hit the other. Neither table is changed.
    pool = BlockPool(4, 2)
    a, b = pool.take(2), pool.take(2)
    pool.publish(pool.chain(ROOT, [1, 2, 3, 4]), a, range(2))
    pool.publish(pool.chain(ROOT, [1, 2, 3, 4]), b, range(2))
    assert found(pool, ROOT, [1, 2, 3, 4], 4) == a
    assert_whole(pool, a, b)
    pool.release(a)
    pool.take(2)
    assert found(pool, ROOT, [1, 2, 3, 4], 4) == b


def test_a_shared_block_is_known_and_its_last_holder_may_write():
    pool = BlockPool(4, 2)
    table = fill(pool, [1, 2])
    pool.share(table)
    assert pool.is_shared(table[0])
    pool.release(table)
    assert not pool.is_shared(table[0])
    pool.begin_write(table[0])
    assert found(pool, ROOT, [1, 2], 2) == []
    assert_whole(pool, table)


def test_num_unheld_counts_what_a_hold_would_take_from_the_available():
    pool = BlockPool(4, 2)
    fill(pool, [1, 2])
    pool.release(fill(pool, [3, 4]))
    hits = [pool.match(pool.chain(ROOT, tokens), 2)[0] for tokens in ([1, 2], [3, 4])]
    assert pool.num_unheld(hits) == 1


def test_releasing_twice_and_taking_too_many_are_bugs():
    pool = BlockPool(2, 2)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(table)
    with pytest.raises(AssertionError, match="room"):
        pool.take(3)


def test_publishing_twice_is_a_bug():
    pool = BlockPool(4, 2)
    table = pool.take(2)
    chain = pool.chain(ROOT, [1, 2, 3, 4])
    pool.publish(chain, table, range(2))
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(chain, table, range(2))


def test_what_follows_a_block_that_is_not_published_is_not_published():
    pool = BlockPool(4, 2)
    table = pool.take(2)
    chain = pool.chain(ROOT, [1, 2, 3, 4])
    pool.publish(chain, table, range(1, 2))
    assert pool.match(chain, 4) == []
    assert not any(map(pool.is_published, table))


def test_only_full_blocks_have_a_name():
    with pytest.raises(AssertionError, match="full"):
        BlockPool(1, 4).chain(ROOT, [1, 2, 3]).link(0)


def test_problems_are_told():
    pool = BlockPool(3, 2)
    table = fill(pool, [1, 2, 3, 4])
    first, second = table
    assert pool.problems([]) == [f"block {b}: 1 references, 0 holders" for b in sorted(table)]
    pool.device._free.append(first)
    assert pool.problems([table]) == [f"block {first}: free 1 times, 1 references"]
    pool.device._free.pop()
    content = pool.device.contents[second]
    content.device.clear()
    assert pool.problems([table]) == [
        f"device block {second}: its content and the index differ",
        "1 contents in no block",
    ]


def eight_bits(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()[:1]


def one_value(message: bytes) -> bytes:
    return b""


class Pool(RuleBasedStateMachine):
    """Against a model that keeps, for every block, the whole prefix it holds."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_tokens=st.integers(1, 3),
        hash_block=st.sampled_from([eight_bits, one_value]),
    )
    def start(self, num_blocks, block_tokens, hash_block):
        self.pool = BlockPool(num_blocks, block_tokens, hash_block=hash_block)
        self.tables: list[tuple[bytes, list[int], list[int]]] = []  # root, tokens, blocks
        # Rewriting a block in place may cut cached descendants off: they can no longer be hit.
        self.torn = False
        self.holds: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block: root, whole prefix

    def _size(self):
        return self.pool.block_tokens

    def _evict(self, blocks):
        for block in blocks:
            self.holds.pop(block, None)

    @rule(
        root=st.sampled_from([ROOT, OTHER]),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        publish=st.booleans(),
    )
    def prompt(self, root, tokens, publish):
        pool, size = self.pool, self._size()
        chain = pool.chain(root, tokens)
        matched = pool.match(chain, len(tokens) - 1)
        hits = [content.device[0] for content in matched]
        for index, block in enumerate(hits):
            assert self.holds[block] == (root, tuple(tokens[: (index + 1) * size]))
        following = tuple(tokens[: (len(hits) + 1) * size])
        if len(following) == (len(hits) + 1) * size < len(tokens) and not self.torn:
            assert (root, following) not in self.holds.values(), "the longest prefix is found"
        new = pool.blocks_for(len(tokens)) - len(hits)
        if new > pool.num_available - pool.num_unheld(matched):
            return
        assert pool.hold(matched) == hits
        taken = pool.take(new)
        self._evict(taken)
        table = hits + taken
        if publish:
            full = range(len(hits), len(tokens) // size)
            pool.publish(chain, table, full)
            for index in full:
                self.holds[table[index]] = (root, tuple(tokens[: (index + 1) * size]))
            self.tables.append((root, tokens, table))
        else:  # ended before it was computed
            self.tables.append((root, [], table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data):
        root, tokens, table = data.draw(st.sampled_from(self.tables))
        self.pool.share(table)
        self.tables.append((root, tokens, list(table)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def write_last(self, data):
        """As the scheduler does before it writes into a block that may be shared."""
        _, _, table = data.draw(st.sampled_from(self.tables))
        if self.pool.is_shared(table[-1]):
            if not self.pool.num_available:
                return
            [copy] = self.pool.take(1)
            self._evict([copy])
            self.pool.release(table[-1:])
            table[-1] = copy
        else:
            self.pool.begin_write(table[-1])
            self.torn |= table[-1] in self.holds
            self._evict(table[-1:])
        assert not self.pool.is_shared(table[-1])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index)[2])

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "pool"):
            return
        assert_whole(self.pool, *(table for _, _, table in self.tables))
        held = {block for _, _, table in self.tables for block in table}
        assert self.pool.num_in_use == len(held)
        assert self.pool.num_cached == len(self.holds.keys() - held)


TestPool = Pool.TestCase
