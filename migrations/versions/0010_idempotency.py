"""Idempotency keys and the answers that are kept for them.

Revision ID: 0010
Revises: 0009
"""

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
