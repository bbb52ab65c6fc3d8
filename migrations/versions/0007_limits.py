"""Limits of tiers, tenants, keys and models.

Revision ID: 0007
Revises: 0006
"""

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
