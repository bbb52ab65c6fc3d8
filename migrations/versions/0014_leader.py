"""Which control plane leads, by a fenced lease.

Revision ID: 0014
Revises: 0013
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# The second index makes an epoch a key: its change waits for transactions that hold the row
# FOR KEY SHARE, and a renewal does not (store/sql/leader.sql).
LEADERS = """
CREATE TABLE leaders (
    role text PRIMARY KEY,
    holder text NOT NULL,
    epoch bigint NOT NULL CONSTRAINT leaders_epoch_check CHECK (epoch > 0),
    taken_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE UNIQUE INDEX leaders_role_epoch_key ON leaders (role, epoch);
"""


def upgrade() -> None:
    op.execute(LEADERS)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
