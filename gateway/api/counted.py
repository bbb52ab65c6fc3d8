"""How many tokens a prompt would be charged for, by the model that its name leads to."""

from core.errors import Refusal, RefusedError
from core.registry import ServedModel
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.images import takes_none
from gateway.prompts import Prompts
from gateway.providers.estimate import prompt_tokens
from gateway.routes import Routes
from gateway.thinking import refuse_thinking


async def counted(
    routes: Routes, prompts: Prompts, identity: Identity, conversation: Conversation, at_ms: int
) -> int:
    """By the text rules of its first target of ours; estimated where only others will do.

    Raises RefusedError, as the request itself would.
    """
    route = routes.find(conversation.model, identity, at_ms)
    if isinstance(route, Refusal):
        raise RefusedError(route)
    image = next(conversation.images, None)
    if image is not None and not any(option.images for option in route.all_options):
        raise takes_none(conversation.model, image.param)
    if all(isinstance(option.model, ServedModel) for option in route.all_options):
        refuse_thinking(conversation.thinking, conversation.model)
    if route.measure is None or image is not None:
        return prompt_tokens(conversation)
    return len(await prompts.ids(route.measure.version, conversation))
