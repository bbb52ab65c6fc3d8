"""How long a conversation is, and what is left out of one that its model could not take."""

from collections.abc import Callable

from core.errors import Refusal, RefusedError
from gateway import responses
from gateway.api.counted import counted
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.prompts import Prompts
from gateway.routes import Routes


class Shortener:
    """Counts as a request itself would be counted."""

    def __init__(self, routes: Routes, prompts: Prompts, now_ms: Callable[[], int]) -> None:
        self._routes = routes
        self._prompts = prompts
        self._now_ms = now_ms

    async def count(self, identity: Identity, conversation: Conversation) -> int:
        """Its prompt's tokens. Raises RefusedError."""
        at_ms = self._now_ms()
        return await counted(self._routes, self._prompts, identity, conversation, at_ms)

    async def fitting(self, identity: Identity, conversation: Conversation) -> Conversation:
        """With as many turns as fit, the last of them if none does. Raises RefusedError."""
        route = self._routes.find(conversation.model, identity, self._now_ms())
        if isinstance(route, Refusal):
            raise RefusedError(route)
        room = responses.room_for(route.widest.context_tokens, conversation.max_tokens)
        places = responses.beginnings(conversation)
        first, last = 0, len(places) - 1  # of the places, between which the answer is
        while first < last:
            middle = (first + last) // 2
            shorter = responses.begun_at(conversation, places[middle])
            if await self._fits(identity, shorter, room):
                last = middle
            else:
                first = middle + 1
        return responses.begun_at(conversation, places[first])

    async def _fits(self, identity: Identity, conversation: Conversation, room: int) -> bool:
        try:
            return await self.count(identity, conversation) <= room
        except RefusedError as error:
            if responses.is_too_long(error):
                return False
            raise
