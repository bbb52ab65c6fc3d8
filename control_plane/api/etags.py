"""Versions of what is changed, as ETags: who changes what they read loses nobody's change.

`If-Match` is optional. Given, it must name what is there, else 412 and nothing is changed. What
counts its versions is named by their numbers, anything else by a hash of itself.
"""

import hashlib
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response

from core.errors import Code, refuse

Body = TypeVar("Body")

NOTHING = 0  # the version of what is not there


def etag(of: int | str) -> str:
    """Of a version's number, or of a hash: the same tag, the same bytes."""
    return f'"{of}"'


def content_hash(content: msgspec.Struct) -> str:
    """Of what has no version."""
    text = msgspec.json.encode(content, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]


def tagged(body: Body, of: int | str, *, status_code: int = 200) -> Response[Body]:
    """An answer that says what it is of."""
    return Response(body, status_code=status_code, headers={"etag": etag(of)})


def require_match(request: Request[Any, Any, Any], of: int | str) -> None:
    """Raises RefusedError: 412, where `If-Match` names something else. `*` is anything there."""
    said = request.headers.get("if-match")
    if said is None:
        return
    tags = {part.strip() for part in said.split(",")}
    if etag(of) not in tags and ("*" not in tags or of == NOTHING):
        message = f"what is there now is {etag(of)}, which If-Match does not name: read it again"
        raise refuse(Code.PRECONDITION, message)
