"""A dialect as the edge uses it: its errors, its limits' headers, its list of models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import Refusal
from core.tickets import Headroom
from gateway import anthropic, openai
from gateway.conversation import ModelCard
from gateway.retry import retry_headers

ANTHROPIC_HEADER = b"anthropic-version"


class Face(NamedTuple):
    """The functions of one dialect that do not depend on the endpoint."""

    error_body: Callable[[Refusal, str], tuple[int, bytes]]
    limit_headers: Callable[[Headroom, int], dict[str, str]]
    models_json: Callable[[Sequence[ModelCard], Mapping[str, str]], bytes]
    model_json: Callable[[ModelCard], bytes]

    def refusal(self, refusal: Refusal, request_id: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        status, body = self.error_body(refusal, request_id)
        return status, body, retry_headers(refusal)


OPENAI = Face(openai.error_body, openai.limit_headers, openai.models_json, openai.model_json)
ANTHROPIC = Face(
    anthropic.error_body, anthropic.limit_headers, anthropic.models_json, anthropic.model_json
)


def face_of(scope: Mapping[str, Any]) -> Face:
    """For paths that both dialects have, and those that neither has."""
    if scope["path"].startswith("/v1/messages"):
        return ANTHROPIC
    speaks = any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return ANTHROPIC if speaks else OPENAI
