"""What a request costs and how large it may grow: pure decisions, from the last routing view.

Where it goes is for `route_plan` to say. Refusals are values, in the order in which each
function tries them. Invariant: what is sized here fits the model's context, and asks for at
least one token.
"""

from typing import NamedTuple, get_args

import msgspec

from core.allowance import UNBOUNDED, Bounds, OutputPolicy
from core.errors import Code, Refusal
from core.money import Price
from core.pricing import UNPRICED, PriceTable, Terms
from core.protocol import ServiceClass
from core.registry import TargetModel
from core.tenancy import Tenant
from core.tickets import ReplicaView

BLOCK_TOKENS_DEFAULT = 16  # of a pool nobody has joined yet


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use. `max_tokens` is for each of its choices."""

    prompt_tokens: int
    max_tokens: int
    choices: int

    @property
    def output_tokens(self) -> int:
        """The most it can produce."""
        return self.max_tokens * self.choices


def terms(tenant: Tenant) -> Terms:
    """What of a tenant decides its prices."""
    return Terms(book=tenant.price_book, tier=tenant.tier, billed=tenant.billed)


class Charged(NamedTuple):
    """A price, and the public name that it is the price of."""

    price: Price
    name: str


def charged(
    prices: PriceTable,
    tenant: Tenant,
    names: tuple[str, ...],
    *,
    service_class: ServiceClass,
    at_ms: int,
) -> Charged | Refusal:
    """The price of a request made at `at_ms` under a name that leads to the others.

    Its own price counts, else that of the name it leads to, whatever target answers in the end.
    Refused: a tenant is billed and there is none. Otherwise it is free, under the last name.
    """
    for name in names:
        price = prices.resolve(terms(tenant), name, service_class=service_class, at_ms=at_ms)
        if price is not None:
            return Charged(price, name)
    return not_priced(names[0]) if tenant.billed else Charged(UNPRICED, names[-1])


def not_priced(model: str) -> Refusal:
    """Nothing is done for a billed tenant that cannot be billed."""
    return Refusal(
        code=Code.MODEL_NOT_PRICED,
        message=f"The model `{model}` has no price for your account.",
        param="model",
    )


def is_sold(prices: PriceTable, tenant: Tenant, model: str, *, at_ms: int) -> bool:
    """Whether the tenant may use the model now, in one class at least."""
    return any(
        prices.charged(terms(tenant), model, service_class=service_class, at_ms=at_ms) is not None
        for service_class in get_args(ServiceClass)
    )


def output_limit(model: TargetModel, output_tokens_max: int) -> int:
    """The most tokens an answer of this model may have; `output_tokens_max` 0 is no limit."""
    limits = (model.context_tokens - 1, model.max_output_tokens, output_tokens_max)
    return min(limit for limit in limits if limit > 0)


def size(
    model: TargetModel,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    choices: int,
    output_tokens_max: int,
    prompt_param: str = "messages",
    bounds: Bounds = UNBOUNDED,
    policy: OutputPolicy = "clamp",
) -> Size | Refusal:
    """Refused: a prompt that fills the context, max_tokens over the limit, both over together.

    So is what is over the caller's own bounds; but a max_tokens that is, is lowered to them
    where the policy says clamp. Without one an answer may take what is left, up to the limits.
    """
    left = model.context_tokens - prompt_tokens
    limit = output_limit(model, output_tokens_max)
    own = bounds.output_tokens_max or limit
    if left < 1:
        return _too_long(
            model,
            f"Your prompt has {prompt_tokens} tokens, which leaves no room for an answer.",
            prompt_param,
        )
    if 0 < bounds.prompt_tokens_max < prompt_tokens:
        return Refusal(
            code=Code.CONTEXT_LENGTH,
            message=f"Your prompt has {prompt_tokens} tokens; the most you may send is "
            f"{bounds.prompt_tokens_max}.",
            param=prompt_param,
        )
    if max_tokens is not None and max_tokens > own and bounds.output_tokens_max:
        if policy == "refuse":
            return Refusal(
                code=Code.BAD_REQUEST,
                message=f"max_tokens is {max_tokens}; the most you may ask for is {own} tokens.",
                param="max_tokens",
            )
        max_tokens = own
    if max_tokens is not None and max_tokens > limit:
        return Refusal(
            code=Code.BAD_REQUEST,
            message=f"max_tokens is {max_tokens}; this model answers with at most {limit} tokens.",
            param="max_tokens",
        )
    if max_tokens is not None and max_tokens > left:
        return _too_long(
            model,
            f"You requested {prompt_tokens + max_tokens} tokens: {prompt_tokens} in the prompt "
            f"and {max_tokens} for the answer.",
            prompt_param,
        )
    return Size(
        prompt_tokens=prompt_tokens,
        max_tokens=min(left, limit, own) if max_tokens is None else max_tokens,
        choices=choices,
    )


def kv_blocks(wanted: Size, block_tokens: int) -> int:
    """Blocks for the prompt and every token it may produce.

    Choices share the prompt's whole blocks; the block that the prompt ends in is copied.
    """
    shared = wanted.prompt_tokens // block_tokens
    whole = -(-(wanted.prompt_tokens + wanted.max_tokens) // block_tokens)
    return shared + wanted.choices * (whole - shared)


def block_tokens(replicas: tuple[ReplicaView, ...]) -> int:
    """The smallest block of a pool, so that nobody is asked to hold more than was counted."""
    return min((replica.block_tokens for replica in replicas), default=BLOCK_TOKENS_DEFAULT)


def _too_long(model: TargetModel, detail: str, param: str) -> Refusal:
    return Refusal(
        code=Code.CONTEXT_LENGTH,
        message=f"This model's maximum context length is {model.context_tokens} tokens. {detail}",
        param=param,
    )
