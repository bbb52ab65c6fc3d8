"""Route tables: targets, conditions, fallbacks, aliases, tenants' own, and allow-lists.

Revision ID: 0008
Revises: 0007
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# A route was one deployment; it becomes a table of one target. `tenant_id` '' is everybody.
ROUTES = """
ALTER TABLE routes
    ADD COLUMN tenant_id text NOT NULL DEFAULT '',
    ADD COLUMN alias     text NOT NULL DEFAULT '',
    ADD COLUMN targets   jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN fallbacks jsonb NOT NULL DEFAULT '[]';
ALTER TABLE routes DROP CONSTRAINT routes_pkey;
ALTER TABLE routes ADD CONSTRAINT routes_pkey PRIMARY KEY (tenant_id, model);
UPDATE routes SET targets = jsonb_build_array(jsonb_build_object('deployment', deployment));
"""

# What tables lead to, as rows: a deployment that is named exists, and who asks what is in use
# reads an index.
TARGETS = """
CREATE TABLE route_targets (
    tenant_id  text NOT NULL,
    model      text NOT NULL,
    path       text NOT NULL,
    deployment text REFERENCES deployments (name),
    provider   text,
    PRIMARY KEY (tenant_id, model, path),
    CONSTRAINT route_targets_route_fkey
        FOREIGN KEY (tenant_id, model) REFERENCES routes (tenant_id, model) ON DELETE CASCADE,
    CONSTRAINT route_targets_kind_check CHECK ((deployment IS NULL) <> (provider IS NULL))
);
CREATE INDEX route_targets_deployment_idx ON route_targets (deployment);
CREATE INDEX route_targets_provider_idx ON route_targets (provider);
INSERT INTO route_targets (tenant_id, model, path, deployment)
SELECT tenant_id, model, 'targets.0', deployment FROM routes;
ALTER TABLE routes DROP COLUMN deployment;
"""

# `key_id` '' is for all of a tenant's keys. No row: every model.
ACCESS = """
CREATE TABLE model_access (
    tenant_id  text NOT NULL REFERENCES tenants (id),
    key_id     text NOT NULL DEFAULT '',
    models     text[] NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, key_id)
);
"""


def upgrade() -> None:
    for statements in (ROUTES, TARGETS, ACCESS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
