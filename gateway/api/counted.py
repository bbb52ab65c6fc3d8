"""How many tokens a prompt would be charged for, by the model that its name leads to."""

from core.errors import Refusal, RefusedError
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.prompts import Prompts
from gateway.providers.estimate import prompt_tokens
from gateway.routes import Routes


async def counted(
    routes: Routes, prompts: Prompts, identity: Identity, conversation: Conversation, at_ms: int
) -> int:
    """By the text rules of its first target of ours; estimated where all are outside.

    Raises RefusedError, as the request itself would.
    """
    route = routes.find(conversation.model, identity, at_ms)
    if isinstance(route, Refusal):
        raise RefusedError(route)
    if route.measure is None:
        return prompt_tokens(conversation)
    return len(await prompts.ids(route.measure.version, conversation))
