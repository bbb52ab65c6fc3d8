"""An answer as it was told, kept so that it can be told again: events in, bytes out, and back.

What is kept is the events of `gateway.conversation`, not the bytes of a response: told again they
make a JSON body or a stream, whichever is asked for then. Runs of text are joined, so that a
replayed stream has fewer events than the first and the same text. Invariant: what is kept is
whole, or nothing: an answer that outgrows its bound leaves only that there was one.

    told event by event ─► Recorder ─► Keeping.kept, as the request is settled ─► read_answer
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from core.idempotency import Claim, Kept
from core.money import EndCause
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    Done,
    Opened,
    StreamEvent,
    ThoughtDelta,
)

FORMAT = 1
EVENT_BYTES = 32  # of an event beside its text, about
CHANCE_BYTES = 32  # of a token's probability, and of each likelier one
WHOLE = frozenset({EndCause.COMPLETE, EndCause.LENGTH, EndCause.FILTERED})

_KINDS: dict[str, type[StreamEvent]] = {
    kind.__name__: kind
    for kind in (Opened, Delta, ThoughtDelta, CallStart, CallDelta, ChoiceEnd, Done)
}


Told = tuple[StreamEvent, int]  # and the tokens that it brought


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whose answer it was, and all of it."""

    request_id: str
    created_ms: int
    events: tuple[Told, ...]


class Recorder:
    """Takes an answer's events as they are told."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._events: list[Told] = []
        self._request_id = ""
        self._whole = False

    def take(self, event: StreamEvent, tokens: int, request_id: str) -> None:
        """The next of them, told under this name. One too many, and all are let go."""
        self._left -= _size(event)
        self._request_id = request_id
        self._whole = isinstance(event, Done)
        if self._left < 0:
            self._events.clear()
        else:
            self._events.append((event, tokens))

    def answer(self, created_ms: int) -> bytes | None:
        """What to keep: empty where it was too large, None of one that was not told in full."""
        if not self._whole:
            return None
        if self._left < 0:
            return b""
        told = [(type(event).__name__, event, tokens) for event, tokens in _joined(self._events)]
        return _msgpack.encode((FORMAT, self._request_id, created_ms, told))


class Keeping:
    """What becomes of one claim: its answer, if there is one, sealed by `seal`."""

    def __init__(
        self,
        claim: Claim,
        *,
        bytes_max: int,
        created_ms: int,
        seal: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.claim = claim
        self._seal = seal
        self.recorder = Recorder(bytes_max)
        self._created_ms = created_ms

    def kept(self, cause: EndCause) -> Kept | None:
        """For the settlement of a request that ended so."""
        answer = self.recorder.answer(self._created_ms) if cause in WHOLE else None
        if answer is None:
            return None
        stored = self._seal(answer) if answer else answer
        return Kept(scope=self.claim.scope, key=self.claim.key, answer=stored)


def read_answer(data: bytes) -> KeptAnswer | None:
    """None for one that another version of ours has kept, in a way that we cannot read."""
    try:
        form, request_id, created_ms, told = _decoder.decode(data)
        if form != FORMAT:
            return None
        events = tuple(
            (msgspec.msgpack.decode(raw, type=_KINDS[name]), tokens) for name, raw, tokens in told
        )
    except (msgspec.MsgspecError, KeyError):
        return None
    return KeptAnswer(request_id=request_id, created_ms=created_ms, events=events)


_msgpack = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    tuple[int, str, int, list[tuple[str, msgspec.Raw, int]]], strict=True
)


def _size(event: StreamEvent) -> int:
    match event:
        case Delta(text=text, chances=chances):
            tops = sum(1 + len(chance.top) for chance in chances)
            return EVENT_BYTES + 4 * len(text) + CHANCE_BYTES * tops
        case ThoughtDelta(text=text, signature=signature, redacted=redacted):
            return EVENT_BYTES + 4 * len(text) + len(signature) + len(redacted)
        case CallDelta(arguments=text) | CallStart(name=text) | Opened(echo=text):
            prompt = len(event.prompt) if isinstance(event, Opened) else 0
            return EVENT_BYTES + 4 * len(text) + 4 * CHANCE_BYTES * prompt
        case _:
            return EVENT_BYTES


def _joined(events: list[Told]) -> Iterator[Told]:
    """With every run of text of one choice, or of one call's arguments, as one event."""
    run: list[Any] = []
    tokens = 0
    for event, count in events:
        if run and not _continues(run[-1], event):
            yield _one(run), tokens
            run, tokens = [], 0
        run.append(event)
        tokens += count
    yield _one(run), tokens  # a whole answer has an event at least, its last


def _continues(before: StreamEvent, event: StreamEvent) -> bool:
    match before, event:
        case Delta(), Delta():
            return before.choice == event.choice
        case ThoughtDelta(signature="", redacted=""), ThoughtDelta(redacted=""):
            return before.choice == event.choice
        case CallDelta(), CallDelta():
            return (before.choice, before.call) == (event.choice, event.call)
        case _:
            return False


def _one(run: list[Any]) -> StreamEvent:
    first: StreamEvent = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, Delta):
        return Delta(
            choice=first.choice,
            text="".join(event.text for event in run),
            chances=tuple(chance for event in run for chance in event.chances),
        )
    if isinstance(first, ThoughtDelta):
        text = "".join(event.text for event in run)
        return ThoughtDelta(choice=first.choice, text=text, signature=run[-1].signature)
    assert isinstance(first, CallDelta)
    return msgspec.structs.replace(first, arguments="".join(event.arguments for event in run))
