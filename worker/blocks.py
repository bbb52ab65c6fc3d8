"""The KV pool's bookkeeping: fixed blocks, reference counts, prefix cache, a second tier.

No KV is here, only who holds which block. A full, computed block is *published*: others find
it by its content (`prefix`). One that is evicted moves to a host block, where there is one to
take, and is moved back when it is hit. Both are decided here and done by the step's plan:

    taken    evicted from a device block, to host ──► moves_out ──┐ all are read before any
    held     found in host memory, to a new block ──► moves_in  ──┘ of them is written

Invariant: what a host block is to receive in this step is not read there in this step.
"""

from collections.abc import Iterable, Sequence

from worker.prefix import Chain, Content, HashFunction, sha256
from worker.published import Published
from worker.tier import Tier

Copy = tuple[int, int]  # source, destination
Moves = tuple[Copy, ...]


class BlockPool:
    """`num_blocks` blocks of `block_tokens` positions each, and `host_blocks` in host memory.

    Marks keep at most `marked_share` of either. `hash_block` is injectable so that tests can
    make it collide.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        host_blocks: int = 0,
        marked_share: float = 0.5,
        hash_block: HashFunction = sha256,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = Tier(num_blocks, int(marked_share * num_blocks))
        self.host = Tier(host_blocks, int(marked_share * host_blocks))
        self.demotes = True  # what is evicted is worth the move to host memory
        self._hash = hash_block
        self._published = Published(self.device, self.host)
        self._out: dict[int, int] = {}  # host block: the block that it is to receive
        self._in: dict[int, int] = {}  # block: the host block that it is to receive
        self._copied: list[Copy] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return self.device.num_available

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose content can still be hit."""
        return self.device.num_cached

    @property
    def num_in_use(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    def blocks_for(self, positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-positions // self.block_tokens)

    def advance(self, now_ms: int) -> None:
        """Let the marks lapse whose time is over."""
        self.device.advance(now_ms)
        self.host.advance(now_ms)

    def chain(self, root: bytes, tokens: Sequence[int]) -> Chain:
        """The names of one sequence's full blocks. `tokens` may grow."""
        return Chain(root, tokens, self.block_tokens, self._hash)

    def match(self, chain: Chain, limit: int) -> list[Content]:
        """The longest published prefix within the chain's first `limit` tokens. Changes nothing."""
        found: list[Content] = []
        parent: Content | None = None
        for index in range(limit // self.block_tokens):
            parent = self._published.find(chain, index, parent)
            if parent is None:
                break
            found.append(parent)
        return found

    def num_unheld(self, contents: Iterable[Content]) -> int:
        """How many blocks would leave `num_available` if these were held."""
        refs = self.device.refs
        return sum(not (content.device and refs[content.device[0]]) for content in contents)

    def hold(self, contents: Sequence[Content]) -> list[int]:
        """A block table for a prefix that `match` found; what is only in host memory moves in."""
        # First all that others could evict while blocks are taken for the rest.
        for content in contents:
            if content.device:
                self.device.hold(content.device[0])
        fetched = [(content, content.host[0]) for content in contents if not content.device]
        for _, host_block in fetched:
            self.host.hold(host_block)
        for content, host_block in fetched:
            block = self.fetch(host_block)
            self._published.put(block, content)
        self.host.release([host_block for _, host_block in fetched])
        return [content.device[0] for content in contents]

    def fetch(self, host_block: int) -> int:
        """A new block that receives in this step what this host block, which is held, has.

        Where that is only on its way out, it is copied from the block that it comes from.
        """
        [block] = self.take(1)
        source = self._out.get(host_block)
        if source is None:
            self._in[block] = host_block
        else:
            self._copied.append((source, block))
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each."""
        for block in blocks:
            self.device.hold(block)

    def take(self, count: int) -> list[int]:
        """`count` blocks for writing: free ones, then cached ones, least recently used first."""
        assert count <= self.num_available, "the caller makes room first"
        taken = []
        for _ in range(count):
            block, content = self.device.take()
            taken.append(block)
            if content is not None:
                content.device.remove(block)
                self._evicted(block, content)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each, given in table order: the tail is evicted first."""
        self.device.release(blocks)

    def is_shared(self, block: int) -> bool:
        """Whether writing needs a copy, because another holder reads this block."""
        return self.device.refs[block] > 1

    def is_published(self, block: int) -> bool:
        """Whether others can find this block."""
        return self.device.contents[block] is not None

    def begin_write(self, block: int) -> None:
        """The only holder is about to write: whatever was published here no longer is."""
        assert self.device.refs[block] == 1
        self._published.take_out(block)

    def publish(self, chain: Chain, table: Sequence[int], blocks: range) -> None:
        """Let others hit these blocks of the table: all full, computed, and writable before.

        What follows a block that was flushed cannot be found, and is not published.
        """
        contents = self.device.contents
        parent = contents[table[blocks.start - 1]] if blocks.start else None
        for index in blocks:
            assert contents[table[index]] is None, "published twice"
            if index and parent is None:
                return
            parent = self._published.find_or_add(chain, index, parent)
            self._published.put(table[index], parent)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Let nobody find what these hold, here or in a copy: it may be no number.

        Their holders keep them.
        """
        for block in blocks:
            content = self.device.contents[block]
            if content is not None:
                self._published.forget(content)

    def mark(self, block: int, ttl_ms: int) -> None:
        """Keep what this held block has published for so long after each use, or longer."""
        content = self.device.contents[block]
        if content is not None and content.ttl_ms < ttl_ms:
            content.ttl_ms = ttl_ms
            for tier, copies in ((self.device, content.device), (self.host, content.host)):
                for copy in copies:
                    tier.touch(copy)

    # Host memory.

    def num_to_stow(self, blocks: Iterable[int]) -> int:
        """How many host blocks `stow` would take from those available, all to be written."""
        contents = (self.device.contents[block] for block in blocks)
        return sum(content is None or not content.host for content in contents)

    def can_stow(self, blocks: Sequence[int]) -> bool:
        """Whether host memory has room for them."""
        hosts = (content.host for b in blocks if (content := self.device.contents[b]) is not None)
        cached = sum(bool(host) and not self.host.refs[host[0]] for host in hosts)
        return self.num_to_stow(blocks) + cached <= self.host.num_available

    def stow(self, blocks: Sequence[int], copied: Copy | None = None) -> list[int]:
        """Hold a host block for each of these, whose KV it has or receives in this step.

        A block that was to be the destination of a copy in this step has its KV at the source.
        """
        sources = {} if copied is None else {copied[1]: copied[0]}
        for block in blocks:
            content = self.device.contents[block]
            if content is not None and content.host:
                self.host.hold(content.host[0])
        return [self._stowed(block, sources.get(block, block)) for block in blocks]

    def unstow(self, host_blocks: Sequence[int]) -> None:
        """Drop a holder of each."""
        self.host.release(host_blocks)

    def moves(self) -> tuple[Moves, Moves, Moves]:
        """Within the pool, out and in, of the step that was decided. Tells each once."""
        out = tuple((block, host_block) for host_block, block in self._out.items())
        into = tuple((host_block, block) for block, host_block in self._in.items())
        copied, self._out, self._in, self._copied = tuple(self._copied), {}, {}, []
        return copied, out, into

    def failed(self, out: Iterable[int], into: Iterable[int]) -> None:
        """Moves to these host blocks and blocks may not have been made: nobody is to find them."""
        for host_block in out:
            self._published.take_out_of_host(host_block)
        for block in into:
            self._published.take_out(block)

    def flush(self) -> None:
        """Forget all that is published. Who holds blocks keeps them."""
        self._published.flush()

    def problems(
        self, tables: Iterable[Sequence[int]], host_tables: Iterable[Sequence[int]] = ()
    ) -> list[str]:
        """What contradicts the block tables of all holders; empty when all is well."""
        host = [f"host {problem}" for problem in self.host.problems(host_tables)]
        return [*self.device.problems(tables), *host, *self._published.problems()]

    def _evicted(self, block: int, content: Content) -> None:
        if content.device or content.host:
            return
        if self.demotes and self.host.num_takeable(content.ttl_ms):
            self.host.release([self._move_out(block, content)])
        else:
            self._published.drop_unheld(content)

    def _stowed(self, block: int, source: int) -> int:
        content = self.device.contents[block]
        if content is not None and content.host:
            return content.host[0]
        return self._move_out(source, content)

    def _move_out(self, block: int, content: Content | None) -> int:
        host_block, lost = self.host.take()
        if lost is not None:
            lost.host.remove(host_block)
            self._published.drop_unheld(lost)
        if content is not None:
            self._published.put_on_host(host_block, content)
        # It may be due to receive another that was lost in this same step: not any more.
        self._out[host_block] = block
        return host_block
