"""Idempotency keys and the answers that are kept for them.

The table and the functions that change it are in `0010_idempotency.sql`, to be read as SQL.

Revision ID: 0010
Revises: 0009
"""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The driver takes a lone percent sign for a placeholder.
    script = Path(__file__).with_suffix(".sql").read_text().replace("%", "%%")
    op.get_bind().exec_driver_sql(script)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
