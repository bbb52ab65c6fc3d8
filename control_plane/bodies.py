"""Every JSON body, held strictly to its handler's type before the handler is called.

Litestar converts leniently ("4" would do for 4); an operator's typing error should not become
a limit. Malformed JSON is 400; JSON that is not what was asked for is 422 and names the field.
"""

import re
from functools import cache
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler

from core.errors import Code, refuse

BODY = "data"  # what Litestar calls a handler's body

# msgspec says "Object contains unknown field `z` - at `$.limits`", or "… `limit` - at `$`".
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `(?P<field>[^`]*)`")


async def check_body(request: Request[Any, Any, Any]) -> None:
    """Raises RefusedError. For use before every handler."""
    body = await request.body()
    path = request.scope["raw_path"] + b"?" + request.scope["query_string"]
    if b"%00" in path or b"\\u0000" in body:
        # Postgres text cannot hold it, and no name or id of ours has a use for it.
        raise refuse(Code.UNPROCESSABLE, "the NUL character cannot be stored")
    decoder = _decoder(request.scope["route_handler"])
    if decoder is None:
        return
    try:
        decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, param = field_at_fault(str(error))
        raise refuse(Code.UNPROCESSABLE, problem, param=param) from error
    except msgspec.DecodeError as error:
        raise refuse(Code.BAD_REQUEST, f"not JSON: {error}") from error


def field_at_fault(message: str) -> tuple[str, str | None]:
    """A validation message without its path, and the dotted name of the field it is about."""
    match = _PATH.search(message)
    parts = [match["path"]] if match and match["path"] else []
    problem = _PATH.sub("", message)
    if match := _FIELD.search(problem):
        parts.append(match["field"])
    return problem, ".".join(parts) or None


@cache
def _decoder(handler: HTTPRouteHandler) -> msgspec.json.Decoder[Any] | None:
    body = handler.parsed_fn_signature.parameters.get(BODY)
    return None if body is None else msgspec.json.Decoder(body.annotation)
