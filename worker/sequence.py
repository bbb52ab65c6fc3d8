"""One choice of one request, as the scheduler sees it: tokens, KV blocks, place in line.

Not the text (that is `detokenize`) and not the request (that is `generation`). Invariant:
`num_computed` positions have valid KV in `blocks`, and at least one token always has not,
because the next token can only be drawn from a position computed in a step.

    tokens      ├──── prompt ────┼── resumed ──┼── new ──┤
    KV          ├─── num_computed ───┤▒▒ remaining ▒▒▒▒▒▒┤
"""

import enum
from typing import Final

from core.protocol import CacheMark, Sampling, ServiceClass, TokenLogprob
from worker.prefix import Chain
from worker.step import Draw, Opening

TTL_MS: Final = {"5m": 5 * 60_000, "1h": 60 * 60_000}  # of cache marks
RANKS: Final[dict[ServiceClass, int]] = {"interactive": 0, "standard": 1, "batch": 2}


class State(enum.Enum):
    """Only RUNNING sequences hold KV blocks."""

    FORKING = "forking"  # waits for its request's first sequence to compute the prompt
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Wait(enum.Enum):
    """Why a waiting sequence was not admitted to the last step."""

    TOKENS = "tokens"  # the step had none left, or nothing was decided yet
    SLOTS = "slots"  # as many run as may
    BLOCKS = "blocks"  # it does not fit beside the expected growth of those that run
    PREFIX = "prefix"  # another computes the next block of its prompt
    ORDER = "order"  # what is free is for one that waited longer, or for those that run


class Stowed:
    """KV of a sequence that was swapped out, in host blocks that it holds."""

    __slots__ = ("blocks", "num_computed", "tail")

    def __init__(self, blocks: list[int], tail: list[int], num_computed: int) -> None:
        self.blocks = blocks  # of its full blocks; those that others held when it left are not
        self.tail = tail  # of the block that is not full, if there is one; or nothing
        self.num_computed = num_computed


class Sequence:
    """Mutable; owned by the scheduler once added.

    `number` is the order of arrival, unique for the engine's life. `final_tokens` is the
    length at which the answer is cut: by `max_tokens` or by the context.
    """

    __slots__ = (
        "blocks", "cached_tokens", "chain", "choice", "deadline_ms", "final_tokens", "forks",
        "is_long", "marks", "num_computed", "num_counted", "num_prompt", "num_resumed", "number",
        "overdue", "rank", "request", "root", "sampling", "slot", "slot_opened", "state",
        "steps_waited", "stowed", "table", "tokens", "untold", "wait", "written_tokens",
    )  # fmt: skip

    def __init__(
        self,
        *,
        number: int,
        request: str,
        choice: int,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        sampling: Sampling,
        root: bytes,
        service_class: ServiceClass,
        deadline_ms: int,
        context_tokens: int,
        tells_prompt: bool = False,
        marks: tuple[CacheMark, ...] = (),
    ) -> None:
        self.number = number
        self.request = request
        self.choice = choice
        self.tokens = [*prompt_ids, *output_ids]
        self.num_prompt = len(prompt_ids)
        self.num_resumed = len(output_ids)
        self.sampling = sampling
        self.root = root
        self.rank = RANKS[service_class]
        self.deadline_ms = deadline_ms
        self.final_tokens = min(self.num_prompt + sampling.max_tokens, context_tokens)
        self.state = State.WAITING
        self.blocks: list[int] = []
        self.num_computed = 0
        self.table: tuple[int, ...] | None = None  # `blocks`, until they change
        self.stowed: Stowed | None = None
        self.chain: Chain | None = None  # set when it is added
        self.cached_tokens: int | None = None  # of the prompt, at the first admission
        # Longest first, so that the first one that covers a block says how long it is kept.
        self.marks = sorted(((TTL_MS[mark.ttl], mark.tokens) for mark in marks), reverse=True)
        self.written_tokens = dict.fromkeys(TTL_MS.values(), 0)  # by the time they are kept
        self.num_counted = 0  # tokens of the prompt before which no write is counted any more
        self.forks: list[Sequence] = []
        self.wait = Wait.TOKENS
        self.steps_waited = 0
        self.overdue = False
        self.is_long = False  # when it was admitted, it had more to compute than one step takes
        self.slot = -1  # among the running ones
        self.slot_opened = False  # a draw has told whose the slot is
        # The first position of the prompt whose logprob is still to be told; None: none is.
        self.untold = 1 if tells_prompt and self.num_prompt > 1 else None

    @property
    def num_tokens(self) -> int:
        """Prompt, resumed and new tokens."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_new(self) -> int:
        """Tokens this attempt produced."""
        return len(self.tokens) - self.num_prompt - self.num_resumed

    @property
    def remaining(self) -> int:
        """Tokens without KV: 1 for a decode, more for a prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def priority(self) -> tuple[int, int]:
        """Smaller goes first. One that waited too long is ranked with the first class."""
        return (0 if self.overdue else self.rank, self.number)

    @property
    def positions_max(self) -> int:
        """Most positions of KV it can ever need: its last token is never fed."""
        return self.final_tokens - 1

    @property
    def hits_max(self) -> int:
        """Most tokens whose KV it may take from others: the rest are to have logits."""
        return (len(self.tokens) if self.untold is None else self.untold) - 1

    def kept_ms(self, end: int) -> int:
        """How long a block of the prompt that ends at `end` is asked to be kept; 0: not asked."""
        if end > self.num_prompt:
            return 0
        return next((ttl_ms for ttl_ms, tokens in self.marks if end <= tokens), 0)

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """The prompt's tokens after each of `start` to `end`, where they are still to be told."""
        if self.untold is None:
            return ()
        return tuple(self.tokens[start + 1 : min(end + 1, self.num_prompt)])

    def tell(
        self, start: int, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[int, tuple[TokenLogprob, ...]]:
        """Take the prompt's logprobs from `start` on; returns those not told before, and where."""
        assert self.untold is not None
        first, end = max(start, self.untold), start + len(logprobs)
        if end > self.untold:
            self.untold = end if end < self.num_prompt else None
        return first, logprobs[first - start :]

    def draw(self) -> Draw:
        """How to choose the token after the last one. The first draw opens its slot."""
        opening = None if self.slot_opened else self._opening()
        self.slot_opened = True
        return Draw(slot=self.slot, index=self.num_output, opening=opening)

    def _opening(self) -> Opening:
        return Opening(
            choice=self.choice,
            sampling=self.sampling,
            prompt_ids=tuple(self.tokens[: self.num_prompt]),
            output_ids=tuple(self.tokens[self.num_prompt :]),
        )
