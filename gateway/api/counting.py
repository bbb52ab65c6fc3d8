"""`POST /v1/messages/count_tokens`: what a prompt would cost, for nothing."""

from gateway import anthropic
from gateway.api.counted import counted
from gateway.api.endpoint import Edge, Endpoint
from gateway.api.faces import ANTHROPIC
from gateway.api.responder import Receive, Responder, Scope
from gateway.images import check_images
from gateway.prompts import Prompts
from gateway.routes import Routes


class CountTokensEndpoint(Endpoint):
    """Counts as the request itself would be counted; nothing is admitted or reserved."""

    def __init__(self, edge: Edge, routes: Routes, prompts: Prompts) -> None:
        super().__init__(edge, name="count_tokens", face=ANTHROPIC)
        self._routes = routes
        self._prompts = prompts

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:
        """The count."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        conversation = anthropic.parse_count_tokens(await self.body(scope, receive))
        check_images(conversation.images, self.edge.limits.images)
        at_ms = self.edge.now_ms()
        count = await counted(self._routes, self._prompts, identity, conversation, at_ms)
        body = anthropic.count_tokens_json(count)
        await respond.whole(200, body, {}, self.edge.new_request_id())
