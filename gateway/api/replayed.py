"""An answer that was told before, in an exchange's place: everything is there, nothing is owed."""

from core.errors import Refusal
from core.money import EndCause
from core.tickets import Headroom
from gateway.relay.channel import Channel
from gateway.replay import KeptAnswer


class Replayed:
    """What `Telling` works with. Nothing that is said to it has an effect."""

    headroom: Headroom | None = None
    route_headers: dict[str, str] = {}  # noqa: RUF012 - nobody adds to it
    writing_since_s = 0.0

    def __init__(self, kept: KeptAnswer) -> None:
        self.request_id = kept.request_id
        self.channel = Channel(len(kept.events))
        for event, tokens in kept.events[:-1]:
            self.channel.push(event, tokens)
        self.channel.end(*kept.events[-1])

    def cancel(self, cause: EndCause, refusal: Refusal | None = None) -> None:
        """The client left: there is nothing to end."""

    def delivered(self, tokens: int) -> None:
        """These were paid for."""

    def abandon(self) -> None:
        """Nobody reads on."""
