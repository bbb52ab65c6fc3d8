"""What a deployment wants of its replicas, and who starts them.

Revision ID: 0018
Revises: 0017
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# `replicas_desired` null: nobody manages the count. `spec` holds what differs from a worker's own
# defaults.
DEPLOYMENTS = """
ALTER TABLE deployments
    ADD COLUMN replicas_desired integer,
    ADD COLUMN launcher         text NOT NULL DEFAULT 'external',
    ADD COLUMN spec             jsonb NOT NULL DEFAULT '{}',
    ADD CONSTRAINT deployments_replicas_desired_check CHECK (replicas_desired >= 0),
    ADD CONSTRAINT deployments_launcher_check CHECK (launcher IN ('external', 'local'));
"""

# `started_at` is this boot's, `ready_at` its first readiness: a cold start lies between them.
# `progress_at` is when it last made a step, or had nothing to do. A drain belongs to a boot.
REPLICAS = """
ALTER TABLE replicas
    ADD COLUMN started_at        timestamptz,
    ADD COLUMN ready_at          timestamptz,
    ADD COLUMN progress_at       timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN drain_reason      text NOT NULL DEFAULT '',
    ADD COLUMN drain_deadline_at timestamptz,
    ADD CONSTRAINT replicas_drain_check CHECK ((drain_reason = '') = (drain_deadline_at IS NULL)),
    DROP CONSTRAINT replicas_state_check,
    ADD CONSTRAINT replicas_state_check CHECK (state IN ('starting', 'loading', 'warming', 'ready',
        'sleeping', 'draining', 'stopped', 'lost'));
"""

# Written before anything is started: a launcher may hold a place for each row, and for no other.
# `home` says which launcher of its kind: processes are one machine's, and seen from there alone.
LAUNCHES = """
CREATE TABLE launches (
    replica_id    text PRIMARY KEY,
    deployment    text NOT NULL REFERENCES deployments (name),
    launcher      text NOT NULL,
    home          text NOT NULL,
    asked_at      timestamptz NOT NULL DEFAULT now(),
    started_at    timestamptz,
    failures      integer NOT NULL DEFAULT 0,
    last_failure  text NOT NULL DEFAULT '',
    retry_at      timestamptz,
    stop_reason   text NOT NULL DEFAULT '',
    stop_asked_at timestamptz,
    stop_grace_ms integer NOT NULL DEFAULT 0,
    CONSTRAINT launches_launcher_check CHECK (launcher IN ('external', 'local')),
    CONSTRAINT launches_failures_check CHECK (failures >= 0),
    CONSTRAINT launches_stop_check CHECK ((stop_reason = '') = (stop_asked_at IS NULL))
);
CREATE INDEX launches_deployment_idx ON launches (deployment);
"""


def upgrade() -> None:
    for statements in (DEPLOYMENTS, REPLICAS, LAUNCHES):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
