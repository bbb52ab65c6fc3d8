"""`GET /v1/models` and `/v1/models/{id}` in Anthropic's shape: pages between two cursors."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.anthropic.moment import rfc3339
from gateway.conversation import ModelCard
from gateway.fields import bad

LIMIT_DEFAULT = 20
LIMIT_MAX = 1000
_LIMIT_DIGITS_MAX = 4


def models_json(cards: Sequence[ModelCard], query: Mapping[str, str]) -> bytes:
    """The page that `limit` and either `after_id` or `before_id` ask for.

    The order is the one given. A cursor names a model on the page before (or after) this one.
    Raises RefusedError for a bad limit or a cursor that names no model.
    """
    limit = _limit(query)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise bad("after_id", "cannot be combined with 'before_id'")
    if before is not None:
        end = _position(cards, "before_id", before)
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0 if after is None else _position(cards, "after_id", after) + 1
        end = start + limit
        has_more = end < len(cards)
    page = cards[start:end]
    return msgspec.json.encode(
        {
            "data": [_model(card) for card in page],
            "has_more": has_more,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def model_json(card: ModelCard) -> bytes:
    """One model."""
    return msgspec.json.encode(_model(card))


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(LIMIT_DEFAULT))
    digits = text.isascii() and text.isdigit() and len(text) <= _LIMIT_DIGITS_MAX
    if not digits or not 1 <= int(text) <= LIMIT_MAX:
        raise bad("limit", f"must be an integer from 1 to {LIMIT_MAX}")
    return int(text)


def _position(cards: Sequence[ModelCard], name: str, model: str) -> int:
    for i, card in enumerate(cards):
        if card.id == model:
            return i
    raise bad(name, "names no model")


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": rfc3339(card.created_ms // 1000),
        "lifecycle": "active",
        "max_input_tokens": card.context_tokens,
        "max_tokens": card.output_tokens_max,
    }
