"""What the API's description says of refusals: every call may be answered by them."""

from collections.abc import Sequence
from typing import Any

from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec

from control_plane.errors import ErrorBody

REFUSALS = {
    400: "not HTTP, or not JSON, as it should be",
    401: "no credential, or one that opens nothing",
    403: "a credential that does not open this",
    404: "there is nothing of this name",
    409: "something is in the way; the message says what",
    412: "it has changed since the version in If-Match",
    413: "the body is larger than any that is taken",
    422: "a field cannot be what it is; `param` names it",
    429: "too many attempts; `Retry-After` says how long to wait",
    500: "a fault of ours, which is logged",
    503: "something that this needs cannot be reached",
}


def described(handlers: Sequence[Any]) -> list[Any]:
    """The same handlers, each telling of its refusals beside what it says of itself."""
    for handler in handlers:
        assert isinstance(handler, HTTPRouteHandler)
        handler.responses = {**_SPECS, **(handler.responses or {})}
    return list(handlers)


_SPECS = {
    status: ResponseSpec(ErrorBody, description=said, generate_examples=False)
    for status, said in REFUSALS.items()
}
