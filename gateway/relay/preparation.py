"""From a call to its targets, and for one of them to a job. Nothing is held or charged yet.

What is refused here has cost nobody anything but the time to render a prompt.
"""

from typing import NamedTuple

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from core.money import Price
from core.prefix import prefix_hashes
from core.registry import ProviderModel, ServedModel, TargetModel
from core.scopes import bounds_of
from core.tickets import Arm
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.overload import told
from gateway.prompts import Prompt
from gateway.providers.estimate import prompt_tokens as estimated_tokens
from gateway.relay.call import Call
from gateway.relay.job import Job
from gateway.relay.prompt import echo_of
from gateway.relay.sampling import sampling_of
from gateway.relay.shared import Shared
from gateway.relay.targets import Prepared
from gateway.route_index import Option, Route
from gateway.route_plan import Facts, Plan, plan
from gateway.routing import Charged, Size, block_tokens, charged, kv_blocks, size
from gateway.stickiness import conversation_key, has_begun
from gateway.thinking import refuse_thinking
from gateway.tools.plan import plan as tool_plan
from gateway.tools.strict import held
from text.rules import TextRules

DESERTED = refuse(Code.UNAVAILABLE, "This model is not available at the moment.").refusal


class _Rendered(NamedTuple):
    """A conversation as one version reads it."""

    conversation: Conversation
    prompt: Prompt
    rules: TextRules


class Preparation:
    """Of one call, as long as its `identity` is good. A prompt is rendered once for a version."""

    def __init__(self, shared: Shared, call: Call, identity: Identity) -> None:
        self._shared = shared
        self._call = call
        self._identity = identity
        self._charged: Charged | None = None
        self._rendered: dict[str, _Rendered] = {}

    async def plan(self) -> Plan:
        """Where it may go, and its price whichever that is. Raises RefusedError."""
        name, identity = self._call.conversation.model, self._identity
        route = self._shared.routes.index.find(name, identity.tenant, identity.key)
        if isinstance(route, Refusal):
            raise RefusedError(route)
        self._charged = self._charge(name, route)
        facts = await self._facts(route)
        if len(route.options) == 1:
            return _planned(plan(route, facts, draw=0))  # the usual route: there is nothing to draw
        key = conversation_key(
            self._call.conversation,
            salt=identity.tenant.salt,
            route=route.name,
            header=self._call.hints.conversation,
        )
        decided = _planned(plan(route, facts, key.draw))
        if decided.first is None or len(decided.open) == 1:
            return decided
        drawn = decided.first.option.name
        unbound = decided.keeper if has_begun(self._call.conversation) else None
        bound = await self._shared.bindings.bind(key.name, drawn, decided.open, unbound=unbound)
        return decided.bound(bound)

    async def prepare(self, option: Option, request_id: str) -> Prepared:
        """The job of one target. Raises RefusedError."""
        assert self._charged is not None, "planned before"
        price, name = self._charged
        model = option.model
        if model.model != name:
            model = _renamed(model, name)
        if isinstance(model, ProviderModel):
            outside = self._shared.outside
            if outside is None:
                raise RefusedError(DESERTED)
            return await outside.prepare(self._call, self._identity, request_id, model, price)
        return await self._prepare_own(model, price, request_id)

    async def _prepare_own(self, model: ServedModel, price: Price, request_id: str) -> Prepared:
        refuse_thinking(self._call.conversation.thinking, model.model)
        self._check_room(model, request_id)
        rendered = await self._render(model.version)
        wanted = self._size(model, len(rendered.prompt.ids))
        await self._check_grammar(model, rendered.conversation)
        job = self._make_job(model, request_id, price=price, rendered=rendered, wanted=wanted)
        return Prepared(job, wanted, job.arm.prefix_hashes)

    def _charge(self, name: str, route: Route) -> Charged:
        found = charged(
            self._shared.routes.view.prices,
            self._identity.tenant,
            (name,) if name == route.name else (name, route.name),
            service_class=self._call.conversation.service_class,
            at_ms=self._call.created_ms,
        )
        if isinstance(found, Refusal):
            raise RefusedError(found)
        return found

    async def _facts(self, route: Route) -> Facts:
        conversation = self._call.conversation
        image = next(conversation.images, None)
        return Facts(
            prompt_tokens=await self._prompt_tokens(route) if route.counts else 0,
            tier=self._identity.tenant.tier,
            service_class=conversation.service_class,
            tags=self._call.hints.tags,
            tools=conversation.toolbox is not None,
            images=image is not None,
            image=image.param if image is not None else "",
        )

    async def _prompt_tokens(self, route: Route) -> int:
        """By the text rules of our first target; a guess where only others will do."""
        if route.measure is None or any(self._call.conversation.images):
            return estimated_tokens(self._call.conversation)
        return len((await self._render(route.measure.version)).prompt.ids)

    async def _render(self, version: str) -> _Rendered:
        known = self._rendered.get(version)
        if known is None:
            rules = await self._shared.prompts.rules(version)
            conversation = held(self._call.conversation, rules.tool_format)
            prompt = await self._shared.prompts.prompt(
                version, conversation, tenant=self._identity.tenant.id
            )
            known = self._rendered[version] = _Rendered(conversation, prompt, rules)
        return known

    def _check_room(self, model: ServedModel, request_id: str) -> None:
        """Refuse what nobody serves, or what the pool has just said that it would refuse."""
        if self._shared.routes.deserted(model.pool):
            raise RefusedError(DESERTED)
        service_class, tenant = self._call.conversation.service_class, self._identity.tenant
        dropped = self._shared.generation.shortage.foreseen(
            model.pool, tenant.id, service_class, self._call.deadline_ms
        )
        if dropped is not None:
            self._shared.metrics.refusals.labels("pool", dropped.reason).inc()
            raise RefusedError(told(dropped, request_id, service_class=service_class))

    async def _check_grammar(self, model: ServedModel, conversation: Conversation) -> None:
        if conversation.grammar is not None:
            await self._shared.grammars.check(
                model.version, conversation.grammar, conversation.grammar_param
            )

    def _size(self, model: ServedModel, prompt_tokens: int) -> Size:
        conversation = self._call.conversation
        most = self._identity.tenant.overload_output_tokens
        shortage = self._shared.generation.shortage
        wanted = size(
            model,
            prompt_tokens=prompt_tokens,
            max_tokens=shortage.shortened(model.pool, conversation.max_tokens, most),
            choices=conversation.n,
            output_tokens_max=self._shared.routes.output_tokens_max,
            prompt_param="prompt" if conversation.kind == "text" else "messages",
            bounds=bounds_of(self._identity.tenant, self._identity.key, model.model),
            policy=self._identity.tenant.output_policy,
        )
        if isinstance(wanted, Refusal):
            raise RefusedError(wanted)
        return wanted

    def _make_job(
        self,
        model: ServedModel,
        request_id: str,
        *,
        price: Price,
        rendered: _Rendered,
        wanted: Size,
    ) -> Job:
        conversation, prompt, rules = rendered
        tenant = self._identity.tenant
        pool = self._shared.routes.replicas(model.pool)
        hashes = prefix_hashes(prompt.ids, salt=tenant.salt, context_tokens=model.context_tokens)
        return Job(
            request_id=request_id,
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
            tools=tool_plan(conversation.toolbox, rules.tool_format),
            salt=tenant.salt,
            arm=Arm(
                ticket=request_id,
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


def _planned(decided: Plan | Refusal) -> Plan:
    if isinstance(decided, Refusal):
        raise RefusedError(decided)
    return decided


def _renamed(model: TargetModel, name: str) -> TargetModel:
    """The same target, billed and limited under another public name that led to it."""
    return msgspec.structs.replace(model, model=name)
