"""What the relay asks of any target of a request, be it ours or an outside provider's."""

from typing import NamedTuple, Protocol

from core.errors import Refusal, RefusedError
from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import Price
from core.protocol import Usage
from core.registry import ProviderModel, TargetModel
from core.route_table import FallbackCause
from gateway.auth import Identity
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.delivery import Times
from gateway.relay.hold import Hold
from gateway.relay.job import Outcome
from gateway.relay.ticket import Ticket
from gateway.routing import Size


class NoPlaceError(RefusedError):
    """A target that is not to be asked now, for this cause: another may be."""

    def __init__(self, refusal: Refusal, cause: FallbackCause | None) -> None:
        super().__init__(refusal)
        self.cause = cause


class AnyJob(Protocol):
    """What is to be generated, by whomever."""

    @property
    def request_id(self) -> str:
        """Of this try alone."""

    @property
    def model(self) -> TargetModel:
        """Under the public name that is billed."""

    @property
    def price(self) -> Price:
        """Of that name."""


class Prepared(NamedTuple):
    """A job, what it may use, and what of its prompt a replica may know."""

    job: AnyJob
    wanted: Size
    prefix_hashes: tuple[str, ...] = ()


class Run(Protocol):
    """One job under way. `run` may be cancelled; `stop` then ends what is left, in time."""

    @property
    def times(self) -> Times:
        """When what happened, on the loop's clock."""

    @property
    def totals(self) -> list[AttemptTotals]:
        """Of the attempts that have ended and did anything."""

    @property
    def usage(self) -> Usage:
        """The answer's totals."""

    @property
    def untold_tokens(self) -> int:
        """Tokens that no event has carried yet."""

    async def run(self) -> Outcome:
        """Until the answer is whole or given up."""

    async def stop(self) -> None:
        """End what is under way; bounded."""

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:
        """Totals so far, as a checkpoint tells them."""

    def timings(self, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them."""


class Outside(Protocol):
    """Outside providers, as the relay uses them."""

    async def prepare(
        self, call: Call, identity: Identity, request_id: str, model: ProviderModel, price: Price
    ) -> Prepared:
        """Raises RefusedError: too long for the model, or what the provider cannot be asked.

        NoPlaceError among them. Whoever has a job says `leave` once it is over.
        """

    def leave(self, job: AnyJob) -> None:
        """Its place at the provider is free; said again it means nothing."""

    def generation(self, job: AnyJob, *, ticket: Ticket, hold: Hold, channel: Channel) -> Run:
        """Of a job that `prepare` made."""
