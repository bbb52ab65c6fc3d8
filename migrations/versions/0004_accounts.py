"""Credits, caps, operators' corrections, a hash chain over entries, usage by month.

The tables and the functions that change them are in `0004_accounts.sql`, to be read as SQL.

Revision ID: 0004
Revises: 0003
"""

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The driver takes a lone percent sign for a placeholder.
    script = Path(__file__).with_suffix(".sql").read_text().replace("%", "%%")
    op.get_bind().exec_driver_sql(script)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
