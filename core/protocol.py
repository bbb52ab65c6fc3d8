"""The wire between gateway and worker: one request, then a stream of frames.

`POST /generate` carries one msgpack `Generate`; the answer is a stream of frames, each a
4-byte big-endian length and that many bytes of msgpack. `Load` may come anywhere. A refused
attempt is one `Nack`; one that ended before its first step is one `Failed` or `Finished`. A
stream that ends without one of those three was cut, and is never a success.

    Nack | Failed | Finished | Started Prompted* Tokens* (Finished | Failed)

`POST /abort/{request_id}:{attempt}` asks for an early `Finished(cause="aborted")`. Frames
keep coming until then: closing the socket is not a way to cancel. Its answer names the boot
that heard it in a header, so that who lost a connection can tell a death from a cut.
"""

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

FRAME_BYTES_MAX = 4 * 1024 * 1024
LENGTH_BYTES = 4
BOOT_HEADER = b"x-headworks-boot"

ServiceClass = Literal["interactive", "standard", "batch"]
FinishReason = Literal["stop", "length"]
FinishCause = Literal["complete", "aborted", "expired"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer's text must be.

    `text` is a JSON schema, a regular expression, a JSON array of strings to choose from, or a
    Lark grammar; it is empty for `json_object`.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen.

    The draw for output position `i` of choice `c` is a function of (seed, c, i) alone, so a
    resumed or preempted sequence continues as it would have.
    """

    seed: int  # 0 <= seed < 2**63; the gateway sets one when the client does not
    max_tokens: int  # > 0, output tokens for each choice
    min_tokens: int = 0  # output tokens before which nothing but max_tokens ends a choice
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # of the likeliest token's probability; 0 is off
    repetition_penalty: float = 1.0  # over prompt and output; 1 is off
    frequency_penalty: float = 0.0  # over the output, for each time
    presence_penalty: float = 0.0  # over the output, once
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()  # () allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token and the n likeliest
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    grammar: Grammar | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the request's `n` answers, possibly resumed.

    `output_ids` are the tokens already accepted from earlier attempts; `released_chars` is
    how many characters of their text the client already has.
    """

    index: int
    output_ids: tuple[int, ...] = ()
    released_chars: int = 0


class CacheMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt's first `tokens` are asked to be kept so long after their last use."""

    tokens: int
    ttl: Literal["5m", "1h"] = "5m"


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /generate`."""

    request_id: str
    attempt: int  # 1, 2, …: each retry or resume is a new attempt
    version: str  # the worker refuses any version but its own
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    sampling: Sampling
    tenant_salt: bytes  # prefix blocks are shared only under equal salt
    cache_marks: tuple[CacheMark, ...] = ()
    service_class: ServiceClass = "standard"
    deadline_ms: int = 0  # Unix milliseconds; 0 is none
    placement: int = 0  # the dispatcher's number for this placement on this replica


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms, before temperature and any filter."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute totals of one attempt: never deltas, so that hearing them twice is harmless."""

    prompt_tokens: int = 0  # tokens of the prompt, cached and written ones included
    cached_tokens: int = 0  # of those, read from the prefix cache
    cache_write_5m_tokens: int = 0  # of those, written to a cache that keeps them 5 minutes
    cache_write_1h_tokens: int = 0  # and of those, an hour
    output_tokens: int = 0  # produced by this attempt, all choices together
    reasoning_tokens: int = 0  # of those, thought and not shown

    @property
    def cache_write_tokens(self) -> int:
        """Of the prompt, what a cache took."""
        return self.cache_write_5m_tokens + self.cache_write_1h_tokens

    @property
    def fresh_tokens(self) -> int:
        """Of the prompt, what no cache held or took. Negative: these totals are nobody's."""
        return self.prompt_tokens - self.cached_tokens - self.cache_write_tokens

    @property
    def is_possible(self) -> bool:
        """Whether these could be anyone's: nothing negative, no part larger than its whole."""
        totals: tuple[int, ...] = msgspec.structs.astuple(self)
        shown = self.output_tokens - self.reasoning_tokens
        return min(*totals, self.fresh_tokens, shown) >= 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, on the worker's monotonic clock; their sum is the attempt's life there."""

    queue_ms: float = 0.0  # before its first step, and while all of it is preempted
    prefill_ms: float = 0.0  # otherwise, until its first token
    decode_ms: float = 0.0  # and from then on


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag="nack"):
    """Not taken, nothing computed, nothing to bill: the ticket may go elsewhere.

    `fits_never` says that no wait will help here (longer than the pool or the context).
    """

    reason: str  # full | draining | asleep | wrong_version | fits_never | journal_full | duplicate
    fits_never: bool = False
    detail: str = ""  # the arithmetic, for a log


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The first prefill step was scheduled."""

    boot_id: str
    prompt_tokens: int
    cached_tokens: int


class Prompted(msgspec.Struct, frozen=True, kw_only=True, tag="prompted"):
    """Logprobs of the prompt's tokens from position `start` (> 0) on, in order, once each."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Progress of one choice: ids when generated, text when released.

    Text lags ids while a character or a stop string is still open. `finish` closes the
    choice; `stop` is then the stop string that matched, if one did. concat(text) over all
    attempts equals decode(all ids) up to the stop string.
    """

    choice: int
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of `ids`
    finish: FinishReason | None = None
    stop: str | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """An absolute report; `seq` rises, so that a stale one is recognised.

    `placed_seq` is the highest placement number this worker has accepted: placements above
    it are not yet in `kv_blocks_free`, and the dispatcher subtracts them itself.
    """

    boot_id: str
    seq: int
    kv_blocks_total: int
    kv_blocks_free: int  # free or evictable
    running: int
    waiting: int
    placed_seq: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The engine's last word on an attempt. `journal_seq` is where its journal holds it."""

    cause: FinishCause
    usage: Usage
    timings: Timings
    journal_seq: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The attempt ended by a fault. `retryable` says whether another replica may do better."""

    code: str  # bad_request | internal | overloaded | shutting_down
    message: str
    retryable: bool
    usage: Usage = Usage()


Frame = Nack | Started | Prompted | Tokens | Load | Finished | Failed

_LENGTH = struct.Struct(">I")
_frame_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_generate_decoder = msgspec.msgpack.Decoder(Generate)


class ProtocolError(Exception):
    """The peer broke the framing or sent a message this version does not know."""


def encode_frame(frame: Frame) -> bytes:
    """Length prefix and body."""
    body = _frame_encoder.encode(frame)
    assert len(body) <= FRAME_BYTES_MAX
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def encode_generate(message: Generate) -> bytes:
    """The body of `POST /generate`."""
    return _frame_encoder.encode(message)


def decode_generate(body: bytes) -> Generate:
    """Raises ProtocolError when the body is not a `Generate`."""
    try:
        return _generate_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(error)) from error


class FrameReader:
    """Splits a byte stream into frames, whatever pieces it arrives in.

    >>> reader = FrameReader()
    >>> list(reader.feed(encode_frame(Nack(reason="full"))))
    [Nack(reason='full', fits_never=False, detail='')]
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # what has come of a frame
        self._wanted = LENGTH_BYTES  # until more of it can be read

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames completed by `data`. Raises ProtocolError on a broken one."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        start, have = 0, len(data)
        while have - start >= LENGTH_BYTES:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > FRAME_BYTES_MAX:
                raise ProtocolError(f"frame of {size} bytes is over {FRAME_BYTES_MAX}")
            body = start + LENGTH_BYTES
            if have - body < size:
                self._wanted = LENGTH_BYTES + size
                break
            yield self._decode(data[body : body + size])
            start = body + size
        else:
            self._wanted = LENGTH_BYTES
        self._buffer += data[start:]

    @property
    def mid_frame(self) -> bool:
        """Whether the stream, ending here, would be cut inside a frame."""
        return bool(self._buffer)

    def _decode(self, body: bytes) -> Frame:
        try:
            return _frame_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from error
