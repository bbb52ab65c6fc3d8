"""What the edge knows of a request, and the relay works on."""

from collections.abc import Awaitable, Callable

import msgspec

from gateway.answer_cache import OFF, Asked
from gateway.auth import Identity
from gateway.conversation import Conversation
from gateway.hints import NO_HINTS, Hints
from gateway.patience import Patience
from gateway.replay import Keeping


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the edge knows of a request."""

    identity: Identity
    renew_identity: Callable[[], Awaitable[Identity]]
    conversation: Conversation
    endpoint: str
    received_s: float  # on the loop's clock
    created_ms: int
    deadline_ms: int
    patience: Patience
    keeping: Keeping | None = None  # of a request with an idempotency key
    hints: Hints = NO_HINTS
    cache: Asked = OFF  # of answers given again
