"""Moments as this dialect writes them."""

from datetime import UTC, datetime


def rfc3339(seconds: int) -> str:
    """Unix seconds as `2026-11-29T23:19:00Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
