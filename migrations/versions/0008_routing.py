"""Route tables: targets, conditions, fallbacks, aliases.

Revision ID: 0008
Revises: 0007
"""

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
