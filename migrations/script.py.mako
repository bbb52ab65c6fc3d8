"""${message}

A migration must suit the release before it: gateways of both run at once. It must not hold a
lock for long; a backfill is a job of its own, not a migration.
"""

from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
