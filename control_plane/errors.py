"""How the control plane tells a refusal: `{"error": {"code", "message", "param"}}`.

What the rules refuse carries its own code; a fault of ours tells the caller nothing but that,
and the log the rest.
"""

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.types import ExceptionHandlersMap

from control_plane.bodies import field_at_fault
from core.errors import Code, Refusal, RefusedError, refuse
from store.postgres import StoreAwayError

_log = logging.getLogger(__name__)

_BY_STATUS = {
    400: Code.BAD_REQUEST,
    401: Code.INVALID_KEY,
    403: Code.FORBIDDEN,
    404: Code.NOT_FOUND,
    405: Code.METHOD_NOT_ALLOWED,
    413: Code.TOO_LARGE,
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`existing_id` is what a refused create would have duplicated."""

    code: str
    message: str
    param: str | None = None
    existing_id: str | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of every answer that is not a success."""

    error: ErrorDetail


class ExistsError(RefusedError):
    """A create that found its name taken."""

    def __init__(self, message: str, *, param: str, existing_id: str) -> None:
        super().__init__(Refusal(code=Code.CONFLICT, message=message, param=param))
        self.existing_id = existing_id


def _refused(_: Request[Any, Any, Any], error: RefusedError) -> Response[ErrorBody]:
    existing = error.existing_id if isinstance(error, ExistsError) else msgspec.UNSET
    refusal = error.refusal
    detail = ErrorDetail(
        code=refusal.code, message=refusal.message, param=refusal.param, existing_id=existing
    )
    headers = {}
    if refusal.retry_after_ms is not None:
        headers["retry-after"] = str(-(-refusal.retry_after_ms // 1000))
    return Response(ErrorBody(detail), status_code=refusal.status, headers=headers)


def _invalid(request: Request[Any, Any, Any], error: ValidationException) -> Response[ErrorBody]:
    # Of a query or path parameter: bodies were checked before.
    problem, param = field_at_fault(str(error.__cause__ or error.detail))
    return _refused(request, refuse(Code.UNPROCESSABLE, problem, param=param))


def _http(_: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    code = _BY_STATUS.get(error.status_code, Code.BAD_REQUEST)
    detail = ErrorDetail(code=code, message=error.detail)
    return Response(ErrorBody(detail), status_code=error.status_code, headers=error.headers)


def _away(request: Request[Any, Any, Any], error: StoreAwayError) -> Response[ErrorBody]:
    facts = {"path": request.url.path, "reason": str(error)}
    _log.warning("postgres is away", extra={"facts": facts})
    return _refused(request, refuse(Code.UNAVAILABLE, "the database cannot be reached; try again"))


def _fault(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    _log.error("request failed", exc_info=error, extra={"facts": {"path": request.url.path}})
    return _refused(request, refuse(Code.INTERNAL, "this is our fault and has been logged"))


HANDLERS: ExceptionHandlersMap = {
    RefusedError: _refused,
    ValidationException: _invalid,
    HTTPException: _http,
    StoreAwayError: _away,
    Exception: _fault,
}
