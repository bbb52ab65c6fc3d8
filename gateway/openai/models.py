"""`GET /v1/models` and `/v1/models/{id}` in OpenAI's shape: the whole list, no pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.conversation import ModelCard

OWNER = "headworks"


def models_json(cards: Sequence[ModelCard], query: Mapping[str, str]) -> bytes:  # noqa: ARG001 - the signature is both dialects'; OpenAI's list takes no query
    """All models, in the order given."""
    return msgspec.json.encode({"object": "list", "data": [_model(card) for card in cards]})


def model_json(card: ModelCard) -> bytes:
    """One model."""
    return msgspec.json.encode(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_ms // 1000,
        "owned_by": OWNER,
    }
