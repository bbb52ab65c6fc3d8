"""Sums of usage per hour and per day, and how far each account's changes are in them.

Revision ID: 0005
Revises: 0004
"""

from pathlib import Path

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The driver takes a lone percent sign for a placeholder.
    script = Path(__file__).with_suffix(".sql").read_text().replace("%", "%%")
    op.get_bind().exec_driver_sql(script)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
