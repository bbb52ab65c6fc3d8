"""What every endpoint shares: who calls, with what body, and where every refusal is told."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from gateway.api.body import ClientLeftError, read_body
from gateway.api.faces import Face, face_of
from gateway.api.responder import Receive, Responder, Scope, Send
from gateway.auth import Authenticator
from gateway.claims import Claims
from gateway.images import ImageLimits
from gateway.metrics import Metrics
from gateway.patience import Bounds

_log = logging.getLogger(__name__)

FAULT = Refusal(code=Code.INTERNAL, message="The gateway failed to answer. Please retry.")


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a request before anybody looks at it."""

    body_bytes_max: int
    body_timeout_s: float
    patience: Bounds
    images: ImageLimits


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint of one gateway works with."""

    auth: Authenticator
    metrics: Metrics
    limits: EdgeLimits
    claims: Claims
    now_ms: Callable[[], int]
    new_request_id: Callable[[], str]


class Endpoint(ABC):
    """One path. `name` labels it; `face` None takes the dialect that the request speaks.

    `method` None takes any.
    """

    method: str | None = "POST"

    def __init__(self, edge: Edge, *, name: str, face: Face | None) -> None:
        self.edge = edge
        self.name = name
        self._face = face

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:
        """Respond once. Raises RefusedError or ClientLeftError before that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this path."""
        face = self._face or face_of(scope)
        respond = Responder(send, face=face, endpoint=self.name, metrics=self.edge.metrics)
        try:
            self._check_method(scope["method"])
            await self.answer(scope, receive, respond)
        except RefusedError as error:
            await respond.refuse(error.refusal, self.edge.new_request_id())
        except ClientLeftError:
            return
        except Exception:
            _log.exception("an endpoint failed", extra={"facts": {"endpoint": self.name}})
            if respond.started:
                raise  # the server cuts the connection: nothing pretends to be whole
            await respond.refuse(FAULT, self.edge.new_request_id())

    async def body(self, scope: Scope, receive: Receive, *, whole_ms: int | None = None) -> bytes:
        """The whole body, within its bounds; one of them may be the request's own."""
        limits = self.edge.limits
        return await read_body(
            scope,
            receive,
            bytes_max=limits.body_bytes_max,
            within_s=limits.body_timeout_s,
            patience_s=None if whole_ms is None else whole_ms / 1000,
        )

    def _check_method(self, method: str) -> None:
        if self.method is not None and method != self.method:
            message = f"{method} is not allowed here; use {self.method}."
            raise refuse(Code.METHOD_NOT_ALLOWED, message)
