"""Scaling policies and decisions.

Revision ID: 0017
Revises: 0016
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

# `body` is the policy whole, so that a release with other defaults changes none. `model` is whose
# replicas it governs in any case: the target's own, or its deployment's.
POLICIES = """
CREATE TABLE scaling_policies (
    target     text PRIMARY KEY,
    deployment text REFERENCES deployments (name),
    model      text NOT NULL REFERENCES models (name),
    body       jsonb NOT NULL,
    version    bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX scaling_policies_model_idx ON scaling_policies (model);
"""

# What a deployment's scaler remembers between rounds, whoever leads, and its last word.
STATES = """
CREATE TABLE scaling_states (
    deployment text PRIMARY KEY REFERENCES deployments (name),
    state      jsonb NOT NULL,
    decision   jsonb NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT now(),
    told_at    timestamptz NOT NULL DEFAULT now()
);
"""

# Never altered; the oldest are deleted, which is what bounds it.
DECISIONS = """
CREATE TABLE scaling_decisions (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    deployment text NOT NULL,
    at         timestamptz NOT NULL DEFAULT now(),
    before     integer,
    desired    integer NOT NULL,
    wake       integer NOT NULL,
    start      integer NOT NULL,
    stop       integer NOT NULL,
    reasons    jsonb NOT NULL,
    alarms     jsonb NOT NULL
);
CREATE INDEX scaling_decisions_deployment_id_idx ON scaling_decisions (deployment, id);
CREATE TRIGGER scaling_decisions_are_final
    BEFORE UPDATE OR TRUNCATE ON scaling_decisions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

# Kept asleep beside those that serve.
WARM = """
ALTER TABLE deployments
    ADD COLUMN replicas_warm integer NOT NULL DEFAULT 0,
    ADD CONSTRAINT deployments_replicas_warm_check CHECK (replicas_warm >= 0);
"""


def upgrade() -> None:
    for statements in (POLICIES, STATES, DECISIONS, WARM):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
