"""Full blocks of tokens under a name that says all that came before them.

A block's digest is hashed over its parent's digest and its own tokens; the chain starts from a
root of model version, adapter and tenant's salt. The digest only finds candidates: a match also
compares the tokens and the identity of the parent, so that a collision cannot lend one prompt's
KV to another (the attack of GHSA-rm76-4mrf-v9r8).

    root ──► [t0 … t15] ──► [t16 … t31] ──► …      a chain: one sequence's full blocks
                  └────────► [u16 … u31]           another that shares the first one
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

HashFunction = Callable[[bytes], bytes]

# Domains: what is hashed as a root can never be hashed as a block, whatever a tenant sends.
_ROOT = b"headworks.kv.root.2\0"
_BLOCK = b"headworks.kv.block.1\0"


def chain_root(version: str, adapter: str, salt: bytes) -> bytes:
    """What the chain of one tenant's prefixes on one model and adapter starts from.

    Injective: each part carries its length, so no two triples share a root. "" is no adapter.
    """
    parts = (version.encode(), adapter.encode(), salt)
    return _ROOT + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def sha256(message: bytes) -> bytes:
    """The digest that is used unless a test brings its own."""
    return hashlib.sha256(message).digest()


class Content:
    """What some blocks hold: these tokens after that parent. One object per distinct content.

    `device` and `host` are the blocks that hold it; the index drops it with the last of them.
    `ttl_ms` is the longest that a mark has asked for; 0 is unmarked.
    """

    __slots__ = ("device", "digest", "host", "parent", "root", "tokens", "ttl_ms")

    def __init__(
        self, digest: bytes, root: bytes, parent: "Content | None", tokens: tuple[int, ...]
    ) -> None:
        self.digest = digest
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.device: list[int] = []
        self.host: list[int] = []
        self.ttl_ms = 0


class Chain:
    """One sequence's full blocks: each is hashed once, when it is first asked for.

    Follows the list of tokens as it grows; what is in a full block never changes.
    """

    __slots__ = ("_block_tokens", "_hash", "_links", "_tokens", "root")

    def __init__(
        self, root: bytes, tokens: Sequence[int], block_tokens: int, hash_block: HashFunction
    ) -> None:
        self.root = root
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._hash = hash_block
        self._links: list[tuple[bytes, tuple[int, ...]]] = []

    def link(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        """Digest and tokens of a block that is full."""
        links = self._links
        while len(links) <= index:
            start = len(links) * self._block_tokens
            tokens = tuple(self._tokens[start : start + self._block_tokens])
            assert len(tokens) == self._block_tokens, "only full blocks are named"
            before = links[-1][0] if links else self._hash(self.root)
            links.append((self._hash(_BLOCK + before + array("Q", tokens).tobytes()), tokens))
        return links[index]


class PrefixIndex:
    """Finds contents by what they are."""

    def __init__(self) -> None:
        self._buckets: dict[bytes, list[Content]] = {}

    def __iter__(self) -> Iterator[Content]:
        for bucket in self._buckets.values():
            yield from bucket

    def find(self, chain: Chain, index: int, parent: Content | None) -> Content | None:
        """The content of the chain's block after this parent, if anybody holds it."""
        digest, tokens = chain.link(index)
        for content in self._buckets.get(digest, ()):
            if content.parent is parent and content.tokens == tokens and content.root == chain.root:
                return content
        return None

    def find_or_add(self, chain: Chain, index: int, parent: Content | None) -> Content:
        """The same, made if there is none."""
        content = self.find(chain, index, parent)
        if content is None:
            digest, tokens = chain.link(index)
            content = Content(digest, chain.root, parent, tokens)
            self._buckets.setdefault(digest, []).append(content)
        return content

    def drop(self, content: Content) -> None:
        """Nobody holds it any more."""
        bucket = self._buckets[content.digest]
        bucket.remove(content)
        if not bucket:
            del self._buckets[content.digest]
