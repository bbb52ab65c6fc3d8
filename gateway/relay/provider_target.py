"""Outside providers as the relay uses them: counted, sized, prepared, asked.

A prompt is counted by estimate, so that one is refused for its length only where even three
quarters of the estimate do not fit; between that and the context the provider has the word.
"""

import msgspec

from core.allowance import UNBOUNDED, Bounds, OutputPolicy
from core.errors import Code, Refusal, RefusedError, refuse
from core.money import Price
from core.providers import ProviderView
from core.registry import ProviderModel
from core.scopes import bounds_of
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.providers.estimate import prompt_tokens
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.hold import Hold
from gateway.relay.provider_generation import ProviderGeneration
from gateway.relay.provider_job import ProviderJob, ProviderParts, note_fault, provider_job
from gateway.relay.targets import AnyJob, NoPlaceError, Prepared
from gateway.relay.ticket import Ticket
from gateway.routes import Routes
from gateway.routing import Size, size

SURE = (3, 4)  # of an estimate
ANSWER_TOKENS = 256  # left for an answer whose prompt may fill the context
GONE = refuse(Code.UNAVAILABLE, "This model is not available at the moment. Please retry.").refusal


class ProviderTargets:
    """Of one gateway."""

    def __init__(self, parts: ProviderParts, routes: Routes) -> None:
        self._parts = parts
        self._routes = routes

    def count(self, conversation: Conversation) -> int:
        """How many tokens its prompt is thought to have."""
        return prompt_tokens(conversation)

    async def prepare(
        self, call: Call, identity: Identity, request_id: str, model: ProviderModel, price: Price
    ) -> Prepared:
        """With a place at the provider, which is asked for before any money is held.

        Raises RefusedError: too long for the model, or what the provider cannot be asked; and
        NoPlaceError, where it is not to be asked now.
        """
        wanted = sized(
            model,
            call.conversation,
            self._routes.output_tokens_max,
            bounds=bounds_of(identity.tenant, identity.key, model.model),
            policy=identity.tenant.output_policy,
        )
        job = provider_job(
            call.conversation,
            request_id=request_id,
            model=model,
            provider=self._provider(model.provider),
            price=price,
            wanted=wanted,
            deadline_ms=call.deadline_ms,
        )
        place = self._parts.place(job.provider, request_id)
        fault = await place.enter()
        if fault is not None:
            note_fault(self._parts.metrics, job.provider.name, request_id, fault)
            self._parts.metrics.refusals.labels("provider", fault.kind).inc()
            raise NoPlaceError(fault.refusal, None if fault.kind == "refused" else fault.kind)
        return Prepared(msgspec.structs.replace(job, place=place), wanted)

    def leave(self, job: AnyJob) -> None:
        """Its place is free, if nothing has said so before."""
        assert isinstance(job, ProviderJob)
        if job.place is not None:
            job.place.leave("unknown")

    def generation(
        self, job: AnyJob, *, ticket: Ticket, hold: Hold, channel: Channel
    ) -> ProviderGeneration:
        """Of a job that `prepare` made."""
        assert isinstance(job, ProviderJob)
        return ProviderGeneration(self._parts, job, ticket=ticket, hold=hold, channel=channel)

    def _provider(self, name: str) -> ProviderView:
        for provider in self._routes.view.providers:
            if provider.name == name:
                return provider
        raise RefusedError(GONE)


def sized(
    model: ProviderModel,
    conversation: Conversation,
    output_tokens_max: int,
    *,
    bounds: Bounds = UNBOUNDED,
    policy: OutputPolicy = "clamp",
) -> Size:
    """What it may use, within the caller's own bounds. Raises RefusedError."""
    estimate = prompt_tokens(conversation)
    part, of = SURE
    wanted = size(
        model,
        prompt_tokens=estimate * part // of,
        max_tokens=conversation.max_tokens,
        choices=conversation.n,
        output_tokens_max=output_tokens_max,
        prompt_param="prompt" if conversation.kind == "text" else "messages",
        bounds=bounds,
        policy=policy,
    )
    if isinstance(wanted, Refusal):
        raise RefusedError(wanted)
    most = wanted.max_tokens
    if conversation.max_tokens is None:
        left = model.context_tokens - estimate
        most = min(most, max(left, ANSWER_TOKENS))
    return Size(prompt_tokens=estimate, max_tokens=most, choices=wanted.choices)
