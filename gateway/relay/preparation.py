"""From a call to a job: routed, priced, rendered, sized. Nothing is held or charged yet.

What is refused here has cost nobody anything but the time to render a prompt.
"""

from typing import NamedTuple

from core.errors import Code, Refusal, RefusedError, refuse
from core.money import Price
from core.prefix import prefix_hashes
from core.registry import ServedModel
from core.tickets import Arm
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.overload import told
from gateway.prompts import Prompt
from gateway.relay.call import Call
from gateway.relay.job import Job
from gateway.relay.prompt import echo_of
from gateway.relay.sampling import sampling_of
from gateway.relay.shared import Shared
from gateway.routing import Size, block_tokens, charged, kv_blocks, route, size
from gateway.tools.plan import plan
from gateway.tools.strict import held
from text.rules import TextRules

DESERTED = refuse(Code.UNAVAILABLE, "This model is not available at the moment.").refusal


class Prepared(NamedTuple):
    """A job, and what it may use."""

    job: Job
    wanted: Size


class Preparation:
    """Of one call. `identity` and `request_id` change when it starts over."""

    def __init__(self, shared: Shared, call: Call, identity: Identity, request_id: str) -> None:
        self._shared = shared
        self._call = call
        self._identity = identity
        self._request_id = request_id

    async def prepare(self) -> Prepared:
        """Raises RefusedError."""
        model = self._route()
        self._check_room(model)
        price = self._price(model)
        rules = await self._shared.prompts.rules(model.version)
        conversation = held(self._call.conversation, rules.tool_format)
        prompt = await self._shared.prompts.prompt(model.version, conversation)
        wanted = self._size(model, len(prompt.ids))
        await self._check_grammar(model, conversation)
        job = self._make_job(
            model,
            price=price,
            prompt=prompt,
            wanted=wanted,
            conversation=conversation,
            rules=rules,
        )
        return Prepared(job, wanted)

    def _route(self) -> ServedModel:
        model = route(self._shared.routes.models, self._call.conversation.model)
        if isinstance(model, Refusal):
            raise RefusedError(model)
        if self._shared.routes.deserted(model.pool):
            raise RefusedError(DESERTED)
        return model

    def _check_room(self, model: ServedModel) -> None:
        """Refuse what the pool would refuse, as far as it has just said so."""
        service_class, tenant = self._call.conversation.service_class, self._identity.tenant
        dropped = self._shared.generation.shortage.foreseen(
            model.pool, tenant.id, service_class, self._call.deadline_ms
        )
        if dropped is not None:
            raise RefusedError(told(dropped, self._request_id, service_class=service_class))

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
        most = self._identity.tenant.overload_output_tokens
        shortage = self._shared.generation.shortage
        wanted = size(
            model,
            prompt_tokens=prompt_tokens,
            max_tokens=shortage.shortened(model.pool, conversation.max_tokens, most),
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
            request_id=self._request_id,
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
                ticket=self._request_id,
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
