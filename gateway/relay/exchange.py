"""One request as a task: routed, counted, admitted and reserved, generated, ended, settled.

The response reads `channel` and says what it wrote; a client that left is a call of `cancel`.
Invariant: `run` ends with exactly one outcome, whatever is cancelled, and what follows from
it (letting go at the dispatcher, settling) is nobody's to cancel.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from core.metering import RequestTimings, Reserve, Witness
from core.money import EndCause, Price
from core.prefix import prefix_hashes
from core.registry import ServedModel
from core.tickets import Admit, Arm, CacheVersions, Headroom, Stale
from gateway.auth import Identity
from gateway.conversation import Broke, Conversation, Done
from gateway.prompts import Prompt
from gateway.relay.channel import Channel
from gateway.relay.generation import Generation
from gateway.relay.hold import Hold, ledger_refusal
from gateway.relay.job import FAULT, Job, Outcome
from gateway.relay.prompt import echo_of
from gateway.relay.sampling import sampling_of
from gateway.relay.shared import Shared
from gateway.relay.ticket import Ticket
from gateway.routing import Size, block_tokens, charged, kv_blocks, route, size
from gateway.tools.plan import plan
from gateway.tools.strict import held
from text.rules import TextRules

_log = logging.getLogger(__name__)

STALE_TRIES = 2
DESERTED = refuse(Code.UNAVAILABLE, "This model is not available at the moment.").refusal
CHANGING = refuse(Code.UNAVAILABLE, "Your account is being changed. Please retry.").refusal


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the edge knows of a request."""

    identity: Identity
    renew_identity: Callable[[], Awaitable[Identity]]
    conversation: Conversation
    endpoint: str
    received_s: float  # on the loop's clock
    created_ms: int
    deadline_ms: int


class Exchange:
    """One request. `task` runs it."""

    def __init__(self, shared: Shared, call: Call) -> None:
        self._shared = shared
        self._call = call
        self._identity = call.identity
        self._clock = asyncio.get_running_loop().time
        self._stop: Outcome | None = None
        self._running = False
        self._ending = False
        self._ticket: Ticket | None = None
        self._hold: Hold | None = None
        self._generation: Generation | None = None
        self._job: Job | None = None
        self._delivered_tokens = 0
        self._read_out = asyncio.Event()
        self.request_id = shared.new_request_id()
        self.channel = Channel(shared.limits.events_max)
        self.writing_since_s = 0.0  # 0 while the response is not stuck in a write
        self.cut_connection: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None

    # What the response calls.

    @property
    def headroom(self) -> Headroom | None:
        """The tenant's limits as of its admission."""
        return self._ticket.headroom if self._ticket is not None else None

    def cancel(self, cause: EndCause, refusal: Refusal | None = None) -> None:
        """End it now, unless it is ending already. The first caller's cause counts."""
        if self._stop is not None or self._ending:
            return
        self._stop = Outcome(cause=cause, refusal=refusal)
        if self._running and self.task is not None:
            self.task.cancel()

    def delivered(self, tokens: int) -> None:
        """Tokens were written to the client."""
        self._delivered_tokens += tokens

    def cut(self) -> None:
        """The client takes nothing any more: end it, and its connection."""
        self.cancel(EndCause.CLIENT_CANCELLED)
        if self.cut_connection is not None:
            self.cut_connection()

    def abandon(self) -> None:
        """The response reads no more. One that ends so before the exchange has failed it."""
        self.cancel(EndCause.FAILED, FAULT)
        self._read_out.set()

    # The task.

    async def run(self) -> None:
        """From routing to the last event; settlement follows on its own."""
        self._running = True
        timer = asyncio.get_running_loop().call_later(self._overdue_s(), self._overdue)
        try:
            outcome = self._stop or await self._serve()
        except asyncio.CancelledError:
            outcome = self._stop or Outcome(cause=EndCause.FAILED, refusal=FAULT)
        except RefusedError as error:
            outcome = Outcome(cause=EndCause.NOT_STARTED, refusal=error.refusal)
        except Exception:  # noqa: BLE001 - whatever it is, the request must end and be settled
            facts = {"request_id": self.request_id}
            _log.exception("a request failed by a fault of ours", extra={"facts": facts})
            outcome = Outcome(cause=EndCause.FAILED, refusal=FAULT)
        self._ending = True
        timer.cancel()
        if self._generation is not None:
            await self._generation.stop()
        self._tell_end(outcome)
        self._shared.endings.start(self._let_go(self._ticket, self._generation))
        self._shared.endings.start(self._settle(self._hold, outcome))

    async def _serve(self) -> Outcome:
        for _ in range(STALE_TRIES):
            model = self._route()
            price = self._price(model)
            rules = await self._shared.prompts.rules(model.version)
            conversation = held(self._call.conversation, rules.tool_format)
            prompt = await self._shared.prompts.prompt(model.version, conversation)
            wanted = self._size(model, len(prompt.ids))
            await self._check_grammar(model, conversation)
            self._job = job = self._make_job(
                model,
                price=price,
                prompt=prompt,
                wanted=wanted,
                conversation=conversation,
                rules=rules,
            )
            if await self._accept(job, wanted):
                return await self._generate(job)
            await self._start_over()
        raise RefusedError(CHANGING)

    def _route(self) -> ServedModel:
        model = route(self._shared.routes.models, self._call.conversation.model)
        if isinstance(model, Refusal):
            raise RefusedError(model)
        if self._shared.routes.deserted(model.pool):
            raise RefusedError(DESERTED)
        return model

    def _price(self, model: ServedModel) -> Price:
        price = charged(
            self._shared.routes.view.prices,
            self._identity.tenant,
            model.model,
            service_class=self._call.conversation.service_class,
            at_ms=self._call.created_ms,
        )
        if isinstance(price, Refusal):
            raise RefusedError(price)
        return price

    async def _check_grammar(self, model: ServedModel, conversation: Conversation) -> None:
        if conversation.grammar is not None:
            await self._shared.grammars.check(
                model.version, conversation.grammar, conversation.grammar_param
            )

    def _size(self, model: ServedModel, prompt_tokens: int) -> Size:
        conversation = self._call.conversation
        wanted = size(
            model,
            prompt_tokens=prompt_tokens,
            max_tokens=conversation.max_tokens,
            choices=conversation.n,
            output_tokens_max=self._shared.routes.output_tokens_max,
            prompt_param="prompt" if conversation.kind == "text" else "messages",
        )
        if isinstance(wanted, Refusal):
            raise RefusedError(wanted)
        return wanted

    def _make_job(
        self,
        model: ServedModel,
        *,
        price: Price,
        prompt: Prompt,
        wanted: Size,
        conversation: Conversation,
        rules: TextRules,
    ) -> Job:
        tenant = self._identity.tenant
        pool = self._shared.routes.replicas(model.pool)
        hashes = prefix_hashes(prompt.ids, salt=tenant.salt, context_tokens=model.context_tokens)
        return Job(
            request_id=self.request_id,
            model=model,
            price=price,
            prompt_ids=prompt.ids,
            cache_marks=prompt.marks,
            sampling=sampling_of(
                conversation,
                prompt_tokens=wanted.prompt_tokens,
                max_tokens=wanted.max_tokens,
                rules=rules,
                new_seed=self._shared.new_seed,
            ),
            choices=conversation.n,
            wants_chances=conversation.logprobs is not None,
            echo=echo_of(conversation, rules),
            rules=rules,
            tools=plan(conversation.toolbox, rules.tool_format),
            salt=tenant.salt,
            arm=Arm(
                ticket=self.request_id,
                gateway=self._shared.gateway_id,
                pool=model.pool,
                tenant=tenant.id,
                weight=tenant.weight,
                service_class=conversation.service_class,
                deadline_ms=self._call.deadline_ms,
                kv_blocks=kv_blocks(wanted, block_tokens(pool)),
                prompt_tokens=len(prompt.ids),
                prefix_hashes=hashes,
            ),
        )

    async def _accept(self, job: Job, wanted: Size) -> bool:
        """Charge limits and hold money, side by side; false when we decided from stale rows."""
        self._hold = hold = self._make_hold(job, wanted)
        self._ticket = ticket = self._make_ticket(job)
        admitted = await ticket.admit()
        if isinstance(admitted, Stale):
            return False
        if isinstance(admitted, Refusal):
            raise RefusedError(admitted)
        refused = await hold.held()
        if refused is not None:
            raise RefusedError(ledger_refusal(refused, job.price.currency))
        return True

    def _make_hold(self, job: Job, wanted: Size) -> Hold:
        identity, conversation = self._identity, self._call.conversation
        asked = Reserve(
            request_id=self.request_id,
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
        )
        return Hold(
            self._shared.books,
            asked,
            price=job.price,
            size=wanted,
            hard_capped=identity.hard_capped,
            limits=self._shared.hold_limits,
        )

    def _make_ticket(self, job: Job) -> Ticket:
        identity = self._identity
        cached = self._shared.prefixes.cached_tokens(
            job.arm.prefix_hashes, job.model.context_tokens
        )
        asked = Admit(
            ticket=self.request_id,
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
            input_tokens=len(job.prompt_ids) - min(cached, len(job.prompt_ids)),
        )
        return Ticket(self._shared.generation.dispatch, asked)

    async def _start_over(self) -> None:
        """Undo, read what we had cached again, and go on under a new name.

        The old name is spent: its reservation was made from the old rows.
        """
        assert self._ticket is not None
        assert self._hold is not None
        self._shared.endings.start(self._ticket.cancel())
        self._shared.endings.start(self._hold.release(self._shared.now_ms()))
        self._ticket = self._hold = None
        self._identity = await self._call.renew_identity()
        await self._shared.renew_routes()
        self.request_id = self._shared.new_request_id()

    async def _generate(self, job: Job) -> Outcome:
        assert self._ticket is not None
        assert self._hold is not None
        self._generation = Generation(
            self._shared.generation,
            job,
            ticket=self._ticket,
            hold=self._hold,
            channel=self.channel,
        )
        return await self._generation.run()

    # The end.

    def _overdue_s(self) -> float:
        left_ms = self._call.deadline_ms - self._shared.now_ms()
        return left_ms / 1000 + self._shared.limits.overdue_grace_s

    def _overdue(self) -> None:
        """The engine and the dispatcher end what is overdue; this is for when they cannot."""
        refusal = Refusal(code=Code.TIMEOUT, message="The request was not done by its deadline.")
        self.cancel(EndCause.EXPIRED, refusal)

    def _tell_end(self, outcome: Outcome) -> None:
        generation = self._generation
        if outcome.whole and generation is not None:
            self.channel.end(Done(usage=generation.usage), generation.untold_tokens)
        else:
            self.channel.end(Broke(refusal=outcome.refusal or FAULT))
        self._count(outcome)

    async def _let_go(self, ticket: Ticket | None, generation: Generation | None) -> None:
        if ticket is None:
            return
        if generation is None or not generation.totals:
            await ticket.cancel()
            return
        read = generation.totals[-1].usage
        hashes = generation.job.arm.prefix_hashes
        self._shared.prefixes.remember(hashes)
        await ticket.finish(
            input_tokens=read.prompt_tokens - read.cached_tokens, prefix_hashes=hashes
        )

    async def _settle(self, hold: Hold | None, outcome: Outcome) -> None:
        if hold is None:
            return
        generation = self._generation
        await self._read_out.wait()
        await hold.close(
            cause=outcome.cause,
            attempts=tuple(generation.totals) if generation is not None else (),
            delivered_tokens=self._delivered_tokens,
            timings=self._timings(),
            ended_ms=self._shared.now_ms(),
        )
        self._shared.metrics.tokens.labels("delivered").inc(self._delivered_tokens)

    def witnesses(self) -> tuple[Witness, ...]:
        """What a checkpoint says of it while it runs."""
        if self._ending or self._generation is None:
            return ()
        return self._generation.witnesses(self._shared.now_ms())

    @property
    def age_s(self) -> float:
        """Since it was received."""
        return self._clock() - self._call.received_s

    def _timings(self) -> RequestTimings:
        generation = self._generation
        total_ms = self.age_s * 1000
        if generation is None:
            return RequestTimings(total_ms=total_ms)
        return generation.timings(self._call.received_s, total_ms)

    def _count(self, outcome: Outcome) -> None:
        metrics = self._shared.metrics
        metrics.requests.labels(self._call.endpoint, outcome.cause).inc()
        metrics.request_s.observe(self.age_s)
        generation = self._generation
        if generation is None:
            return
        usage = generation.usage
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("cached").inc(usage.cached_tokens)
        metrics.tokens.labels("output").inc(usage.output_tokens)
        times = generation.times
        if times.placed_s:
            metrics.queue_s.observe(times.placed_s - times.armed_s)
        if times.first_token_s:
            metrics.first_token_s.observe(times.first_token_s - self._call.received_s)
