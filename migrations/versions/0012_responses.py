"""Responses that are kept for `previous_response_id`.

Revision ID: 0012
Revises: 0011
"""

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
