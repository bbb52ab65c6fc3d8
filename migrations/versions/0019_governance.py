"""What governing needs of the database: keys and tenants as gateways read them.

They are in `0019_governance.sql`, to be read as SQL.

Revision ID: 0019
Revises: 0018
"""

from pathlib import Path

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The driver takes a lone percent sign for a placeholder.
    script = Path(__file__).with_suffix(".sql").read_text().replace("%", "%%")
    op.get_bind().exec_driver_sql(script)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
