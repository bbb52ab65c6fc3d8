"""Safety policies, and the record of what they did.

Revision ID: 0011
Revises: 0010
"""

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
