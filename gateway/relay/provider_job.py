"""What an outside provider is asked for, and what every such request of a gateway works with.

As `gateway.relay.job` for our own workers. The prompt's size is our estimate until the provider
tells: a job is sized, limited and reserved by it, and settled by what is told.
"""

import logging
from collections.abc import Callable

import msgspec

from core.money import Price
from core.providers import ProviderView
from core.registry import ProviderModel
from gateway.conversation import Conversation
from gateway.metrics import Metrics
from gateway.provider_client import Providers
from gateway.providers.faults import Fault
from gateway.providers.translate import request_body
from gateway.relay.endings import Endings
from gateway.relay.provider_place import FleetLimits, ProviderPlace
from gateway.routing import Size

_log = logging.getLogger(__name__)


class ProviderJob(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is what will be sent: a job that has no translation was refused before."""

    request_id: str
    model: ProviderModel
    provider: ProviderView
    price: Price  # of the public name
    conversation: Conversation
    body: bytes
    wanted: Size  # its `prompt_tokens` are an estimate
    deadline_ms: int  # Unix milliseconds
    place: ProviderPlace | None = None  # that it has already

    @property
    def choices(self) -> int:
        """How many answers."""
        return self.wanted.choices


class ProviderParts(msgspec.Struct, frozen=True, kw_only=True):
    """Made once, in `app`."""

    providers: Providers
    metrics: Metrics
    now_ms: Callable[[], int]
    fleet: FleetLimits
    endings: Endings

    def place(self, provider: ProviderView, request_id: str) -> ProviderPlace:
        """To be entered."""
        return ProviderPlace(
            provider,
            request_id,
            guard=self.providers.guard(provider),
            fleet=self.fleet,
            endings=self.endings,
            metrics=self.metrics,
        )


def provider_job(
    conversation: Conversation,
    *,
    request_id: str,
    model: ProviderModel,
    provider: ProviderView,
    price: Price,
    wanted: Size,
    deadline_ms: int,
) -> ProviderJob:
    """Raises RefusedError, naming the field that this provider cannot be asked for."""
    body = request_body(conversation, provider, model=model.upstream, max_tokens=wanted.max_tokens)
    return ProviderJob(
        request_id=request_id,
        model=model,
        provider=provider,
        price=price,
        conversation=conversation,
        body=body,
        wanted=wanted,
        deadline_ms=deadline_ms,
    )


def note_fault(metrics: Metrics, provider: str, request_id: str, fault: Fault) -> None:
    """Say that a provider failed a request, or would not be asked."""
    facts = {
        "request_id": request_id,
        "provider": provider,
        "kind": fault.kind,
        "detail": fault.detail,
    }
    level = logging.ERROR if fault.ours else logging.WARNING
    _log.log(level, "a provider failed a request", extra={"facts": facts})
    metrics.provider_faults.labels(provider, fault.kind).inc()
