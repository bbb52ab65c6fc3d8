"""How long a tenant's answers may be while others wait long.

Revision ID: 0013
Revises: 0012
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# 0 leaves them as they were asked for. A constant default touches no row.
TENANTS = """
ALTER TABLE tenants
    ADD COLUMN overload_output_tokens integer NOT NULL DEFAULT 0,
    ADD CONSTRAINT tenants_overload_output_tokens_check CHECK (overload_output_tokens >= 0);
"""


def upgrade() -> None:
    op.execute(TENANTS)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
