"""Versions of what is changed, as ETags: who changes what they read loses nobody's change.

`If-Match` is optional. Given, it must name the version that is there, else 412 and nothing is
changed.
"""

from typing import Any, TypeVar

from litestar import Request, Response

from core.errors import Code, refuse

Body = TypeVar("Body")


def etag(version: int) -> str:
    """A strong one: the same version is the same bytes."""
    return f'"{version}"'


def tagged(body: Body, version: int, *, status_code: int = 200) -> Response[Body]:
    """An answer that says which version it is of."""
    return Response(body, status_code=status_code, headers={"etag": etag(version)})


def require_match(request: Request[Any, Any, Any], version: int) -> None:
    """Raises RefusedError: 412, where `If-Match` names another version than this."""
    said = request.headers.get("if-match")
    if said is None or said.strip() == "*":
        return
    if etag(version) not in [tag.strip() for tag in said.split(",")]:
        message = f"this is at version {version} now, which {said} does not name: read it again"
        raise refuse(Code.PRECONDITION, message)
