"""Rollouts, their steps and why each was taken.

Revision ID: 0016
Revises: 0015
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# `body` is where the machine stands, whole; the columns beside it are what is searched by.
# One rollout at a time moves a name; the next may wait while the last one keeps its loser warm.
ROLLOUTS = """
CREATE TABLE rollouts (
    name           text PRIMARY KEY,
    tenant_id      text NOT NULL,
    model          text NOT NULL,
    region         text NOT NULL,
    stable         text NOT NULL REFERENCES deployments (name),
    canary         text NOT NULL REFERENCES deployments (name),
    stable_version text NOT NULL REFERENCES model_versions (version),
    canary_version text NOT NULL REFERENCES model_versions (version),
    asked          jsonb NOT NULL,
    body           jsonb NOT NULL,
    wanted         jsonb NOT NULL DEFAULT '[]',
    state          text NOT NULL,
    ended          boolean NOT NULL,
    closed         boolean NOT NULL,
    version        bigint NOT NULL DEFAULT 1, -- rises with what people should have seen
    revision       bigint NOT NULL DEFAULT 1, -- rises with every look
    created_by     text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX rollouts_moving_key ON rollouts (tenant_id, model) WHERE NOT ended;
CREATE INDEX rollouts_open_idx ON rollouts (name) WHERE NOT closed;
"""

EVENTS = """
CREATE TABLE rollout_events (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rollout  text NOT NULL REFERENCES rollouts (name),
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor    text NOT NULL,
    event    text NOT NULL,
    before   text NOT NULL,
    after    text NOT NULL,
    percent  integer NOT NULL,
    reasons  jsonb NOT NULL,
    verdicts jsonb NOT NULL,
    sample   jsonb
);
CREATE INDEX rollout_events_rollout_id_idx ON rollout_events (rollout, id);
CREATE TRIGGER rollout_events_are_final
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rollout_events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

# The grid of control_plane/rollouts/samples.py. What is subtracted keeps exact powers of two,
# which a logarithm may overshoot, in their own bucket.
BUCKET = """
CREATE FUNCTION rollout_bucket(p_value double precision)
RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_value IS NULL THEN NULL
                WHEN p_value <= 1 OR p_value = 'NaN' THEN 0
                ELSE greatest(1, least(511, ceil(16 * ln(p_value) / ln(2::double precision)
                                                 - 1e-9)))::integer
           END
$$;
"""


def upgrade() -> None:
    op.execute(ROLLOUTS)
    op.execute(EVENTS)
    op.execute(BUCKET)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
