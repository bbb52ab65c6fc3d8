"""`GET /v1/models` and `/v1/models/{id}`, in the dialect that the request speaks."""

from urllib.parse import parse_qsl

from core.errors import Code, Refusal, RefusedError, refuse
from gateway.api.endpoint import Edge, Endpoint
from gateway.api.faces import face_of
from gateway.api.responder import Receive, Responder, Scope
from gateway.routes import Routes

QUERY_FIELDS_MAX = 16
PREFIX = "/v1/models/"


class ModelsEndpoint(Endpoint):
    """All models that the tenant may use, or a page of them."""

    method = "GET"

    def __init__(self, edge: Edge, routes: Routes) -> None:
        super().__init__(edge, name="models", face=None)
        self._routes = routes

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - a GET has no body
        """The list."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        cards = self._routes.cards(identity, self.edge.now_ms())
        body = face_of(scope).models_json(cards, _query(scope))
        await respond.whole(200, body, {}, self.edge.new_request_id())


class ModelEndpoint(Endpoint):
    """One model, by its public name."""

    method = "GET"

    def __init__(self, edge: Edge, routes: Routes) -> None:
        super().__init__(edge, name="model", face=None)
        self._routes = routes

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - a GET has no body
        """The model, or 404, or 403 where it has no price."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        name = scope["path"].removeprefix(PREFIX)
        route = self._routes.find(name, identity, self.edge.now_ms())
        if isinstance(route, Refusal):
            raise RefusedError(route)
        body = face_of(scope).model_json(self._routes.card(name, route))
        await respond.whole(200, body, {}, self.edge.new_request_id())


class NowhereEndpoint(Endpoint):
    """Every path that is none of ours."""

    method = None

    def __init__(self, edge: Edge) -> None:
        super().__init__(edge, name="nowhere", face=None)

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - nobody reads what it sent
        """404."""
        raise refuse(Code.NOT_FOUND, "There is nothing at this path.")


def _query(scope: Scope) -> dict[str, str]:
    text = scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=QUERY_FIELDS_MAX))
    except ValueError:
        raise refuse(Code.BAD_REQUEST, "The query has too many fields.") from None
