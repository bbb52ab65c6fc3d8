"""What a job holds before anything runs: its charge on the tenant's limits, and money.

Both are asked for side by side, and let go of by the try that they are for, whatever came of it.
"""

from core.errors import Refusal, RefusedError
from core.metering import Reserve
from core.scopes import scope_kind, scopes_of
from core.tickets import Admit, CacheVersions, Stale
from gateway.auth import Identity
from gateway.relay.call import Call
from gateway.relay.hold import Hold, ledger_refusal
from gateway.relay.shared import Shared
from gateway.relay.targets import Prepared
from gateway.relay.ticket import Ticket


class Admission:
    """Asks for the money at once; `accept` for the rest. On the event loop."""

    def __init__(self, shared: Shared, call: Call, identity: Identity, prepared: Prepared) -> None:
        self._shared = shared
        self._call = call
        self._identity = identity
        self._job, self._wanted, self._prefix_hashes = prepared
        self.hold = self._make_hold()
        self.ticket = self._make_ticket()

    async def accept(self) -> bool:
        """False when we decided from stale rows. Raises RefusedError."""
        admitted = await self.ticket.admit()
        if isinstance(admitted, Stale):
            return False
        refusals = self._shared.metrics.refusals
        if isinstance(admitted, Refusal):
            if (by := self.ticket.refused) is not None:
                refusals.labels(scope_kind(by.scope), by.reason).inc()
            raise RefusedError(admitted)
        refused = await self.hold.held()
        if refused is not None:
            refusals.labels("money", refused.limit or refused.reason).inc()
            raise RefusedError(ledger_refusal(refused, self._job.price.currency))
        return True

    def _make_hold(self) -> Hold:
        identity, job, wanted = self._identity, self._job, self._wanted
        conversation, keeping = self._call.conversation, self._call.keeping
        asked = Reserve(
            request_id=job.request_id,
            gateway_id=self._shared.gateway_id,
            tenant_id=identity.tenant.id,
            key_id=identity.key.id,
            amount_micro=0,
            price_id=job.price.id,
            model=job.model.model,
            version=job.model.version,
            region=self._shared.region,
            service_class=conversation.service_class,
            dialect=conversation.dialect,
            endpoint=self._call.endpoint,
            stream=conversation.stream,
            prompt_tokens=wanted.prompt_tokens,
            max_tokens=wanted.max_tokens,
            choices=wanted.choices,
            created_ms=self._call.created_ms,
            claim=keeping.claim if keeping is not None else None,
        )
        return Hold(
            self._shared.books,
            asked,
            price=job.price,
            size=wanted,
            hard_capped=identity.hard_capped,
            limits=self._shared.hold_limits,
            keeping=keeping,
            # Who names no length takes what there is room for.
            whole=identity.tenant.output_policy == "refuse" and conversation.max_tokens is not None,
        )

    def _make_ticket(self) -> Ticket:
        identity, job = self._identity, self._job
        cached = self._shared.prefixes.cached_tokens(self._prefix_hashes, job.model.context_tokens)
        prompt_tokens = self._wanted.prompt_tokens
        asked = Admit(
            ticket=job.request_id,
            gateway=self._shared.gateway_id,
            tenant=identity.tenant.id,
            key=identity.key.id,
            model=job.model.model,
            versions=CacheVersions(
                key=identity.key.version,
                tenant=identity.tenant.version,
                route=job.model.route_version,
            ),
            limits=identity.tenant.limits,
            scopes=scopes_of(identity.tenant, identity.key, job.model.model),
            input_tokens=prompt_tokens - min(cached, prompt_tokens),
            output_tokens=self._wanted.output_tokens,
        )
        return Ticket(self._shared.generation.dispatch, asked)
