"""Where gateways remember together which target a conversation is bound to.

With Valkey away nobody remembers: what was drawn counts, which is the same at every gateway,
and the same as before for a conversation that was bound by its draw.
"""

import logging
from collections.abc import Sequence

from core.bindings import BindingRules
from store.keys import binding_keys
from store.redis_client import RedisAwayError, RedisClient, RedisReplyError
from store.scripts import bind_function

_log = logging.getLogger(__name__)

CALL_TIMEOUT_MS = 250  # a request waits for it


class Bindings:
    """One gateway's side. Raises nothing."""

    def __init__(self, redis_url: str, rules: BindingRules) -> None:
        self._function = bind_function(rules)
        self._client = RedisClient(
            redis_url, libraries=[self._function.library], timeout_ms=CALL_TIMEOUT_MS
        )

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    async def bind(
        self, name: str, drawn: str, allowed: Sequence[str], *, unbound: str | None = None
    ) -> str:
        """The target the conversation is bound to from now on.

        `unbound` is where it goes instead of where it was drawn, if it is surely bound to none.
        """
        first = drawn if unbound is None else unbound
        try:
            answer = await self._client.run(self._function, binding_keys(name), first, *allowed)
        except (RedisAwayError, RedisReplyError) as error:
            _log.warning("a conversation is not remembered", extra={"facts": {"error": str(error)}})
            return drawn
        assert isinstance(answer, bytes)
        return answer.decode()
