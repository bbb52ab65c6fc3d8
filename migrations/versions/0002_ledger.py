"""Accounts, reservations, entries, usage, witnesses, prices and gateways' leases.

The tables and the functions that change them are in `0002_ledger.sql`, to be read as SQL.

Revision ID: 0002
Revises: 0001
"""

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_suffix(".sql").read_text())


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
