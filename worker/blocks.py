"""The KV pool's bookkeeping: fixed blocks, reference counts, prefix cache, LRU of the freed.

No KV is here, only who holds which block. A block is free (no content), cached (no holder,
content kept, may be evicted) or in use, and the three always sum to the pool.

A full, computed block is *published* under a hash chained over its whole prefix, rooted in
the model version and the tenant's salt. The hash only finds candidates: a match also compares
the tokens and the identity of the parent, so that a collision cannot lend one prompt's KV to
another (the attack of GHSA-rm76-4mrf-v9r8).
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

HashFunction = Callable[[bytes], bytes]

# Domains: what is hashed as a root can never be hashed as a block, whatever a tenant sends.
_ROOT = b"headworks.kv.root.1\0"
_BLOCK = b"headworks.kv.block.1\0"


def chain_root(version: str, salt: bytes) -> bytes:
    """What the chain of one tenant's prefixes on one model version starts from.

    Injective: each part carries its length, so no two (version, salt) pairs share a root.
    """
    parts = (version.encode(), salt)
    return _ROOT + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


class _Content:
    """What some blocks hold: these tokens after that parent. One object per distinct content."""

    __slots__ = ("blocks", "digest", "parent", "root", "tokens")

    def __init__(
        self, digest: bytes, root: bytes, parent: "_Content | None", tokens: tuple[int, ...]
    ) -> None:
        self.digest = digest
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[int] = []


class BlockPool:
    """`num_blocks` blocks of `block_tokens` positions each.

    `hash_block` is injectable so that tests can make it collide.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, hash_block: HashFunction = _sha256
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._hash = hash_block
        self._refs = [0] * num_blocks
        self._contents: list[_Content | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently freed first. An OrderedDict removes from the middle in O(1), which a
        # hit needs.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, list[_Content]] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose content can still be hit."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    def blocks_for(self, positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-positions // self.block_tokens)

    def match(self, root: bytes, tokens: Sequence[int], limit: int) -> list[int]:
        """Blocks holding the longest published prefix of `tokens[:limit]`. Changes nothing."""
        found: list[int] = []
        parent: _Content | None = None
        for end in range(self.block_tokens, limit + 1, self.block_tokens):
            parent = self._find(root, parent, tuple(tokens[end - self.block_tokens : end]))
            if parent is None:
                break
            found.append(parent.blocks[0])
        return found

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these would leave `num_available` if they were held."""
        return sum(not self._refs[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each: a prefix hit, or a fork's share."""
        for block in blocks:
            self._refs[block] += 1
            self._cached.pop(block, None)

    def take(self, count: int) -> list[int]:
        """`count` blocks for writing: free ones, then cached ones, least recently used first."""
        assert count <= self.num_available, "the caller makes room first"
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._cached.popitem(last=False)[0]
            self._evict(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each, given in table order.

        The tail is freed first and so evicted first: a prefix is worth more than what follows
        it, and a parent is never evicted before its child.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, "released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._contents[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def is_shared(self, block: int) -> bool:
        """Whether writing needs a copy, because another holder reads this block."""
        return self._refs[block] > 1

    def begin_write(self, block: int) -> None:
        """The only holder is about to write: whatever was published here no longer is."""
        assert self._refs[block] == 1
        self._evict(block)

    def publish(
        self, root: bytes, tokens: Sequence[int], table: Sequence[int], blocks: range
    ) -> None:
        """Let others hit these blocks of the table: all full, computed, and writable before.

        Everything before them in the table is published already.
        """
        parent = self._contents[table[blocks.start - 1]] if blocks.start else None
        for index in blocks:
            assert (index > 0) == (parent is not None), "a chain has no holes"
            assert self._contents[table[index]] is None, "published twice"
            start = index * self.block_tokens
            held = tuple(tokens[start : start + self.block_tokens])
            content = self._find(root, parent, held) or self._add(root, parent, held)
            content.blocks.append(table[index])
            self._contents[table[index]] = content
            parent = content

    def problems(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What contradicts the block tables of all holders; empty when all is well."""
        held: Counter[int] = Counter()
        for table in tables:
            held.update(table)
        found = [
            f"block {block}: {refs} references, {held[block]} holders"
            for block, refs in enumerate(self._refs)
            if refs != held[block]
        ]
        for block, refs in enumerate(self._refs):
            cached = not refs and self._contents[block] is not None
            listed = self._free.count(block) + (block in self._cached)
            if (block in self._cached) is not cached or listed != (not refs):
                found.append(f"block {block}: listed {listed} times, cached {cached}")
        return found + self._index_problems()

    def _index_problems(self) -> list[str]:
        indexed = {
            block: content
            for bucket in self._index.values()
            for content in bucket
            for block in content.blocks
        }
        return [
            f"block {block}: its content and the index differ"
            for block, content in enumerate(self._contents)
            if indexed.get(block) is not content
        ]

    def _digest(self, root: bytes, parent: _Content | None, tokens: tuple[int, ...]) -> bytes:
        before = self._hash(root) if parent is None else parent.digest
        return self._hash(_BLOCK + before + array("Q", tokens).tobytes())

    def _find(
        self, root: bytes, parent: _Content | None, tokens: tuple[int, ...]
    ) -> _Content | None:
        for content in self._index.get(self._digest(root, parent, tokens), ()):
            if content.parent is parent and content.tokens == tokens and content.root == root:
                return content
        return None

    def _add(self, root: bytes, parent: _Content | None, tokens: tuple[int, ...]) -> _Content:
        content = _Content(self._digest(root, parent, tokens), root, parent, tokens)
        self._index.setdefault(content.digest, []).append(content)
        return content

    def _evict(self, block: int) -> None:
        content = self._contents[block]
        if content is None:
            return
        self._contents[block] = None
        content.blocks.remove(block)
        if not content.blocks:
            bucket = self._index[content.digest]
            bucket.remove(content)
            if not bucket:
                del self._index[content.digest]
