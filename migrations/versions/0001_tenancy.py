"""Tenants, keys, models, deployments, routes, replicas and the audit log.

Every table a gateway caches carries a `version` taken from `change_clock`: a writer holds the
clock's row until it commits, so versions become visible in the order of their numbers and a
reader that asks for "everything since N" can miss nothing. A sequence would not give that.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

CHANGE_CLOCK = """
CREATE TABLE change_clock (
    stream text PRIMARY KEY CHECK (stream IN ('tenancy', 'routing')),
    value  bigint NOT NULL
);
INSERT INTO change_clock (stream, value) VALUES ('tenancy', 0), ('routing', 0);
"""

TENANCY = """
CREATE TABLE tenants (
    id                    text PRIMARY KEY,
    name                  text NOT NULL UNIQUE,
    salt                  bytea NOT NULL CHECK (octet_length(salt) = 16),
    requests_per_min      bigint NOT NULL DEFAULT 0 CHECK (requests_per_min >= 0),
    input_tokens_per_min  bigint NOT NULL DEFAULT 0 CHECK (input_tokens_per_min >= 0),
    output_tokens_per_min bigint NOT NULL DEFAULT 0 CHECK (output_tokens_per_min >= 0),
    concurrency           bigint NOT NULL DEFAULT 0 CHECK (concurrency >= 0),
    weight                integer NOT NULL DEFAULT 1 CHECK (weight >= 1),
    disabled              boolean NOT NULL DEFAULT false,
    version               bigint NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now(),
    updated_at            timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX tenants_version_idx ON tenants (version);

CREATE TABLE api_keys (
    id         text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants (id),
    name       text NOT NULL,
    public     text NOT NULL,
    digest     bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
    version    bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);
CREATE INDEX api_keys_version_idx ON api_keys (version);
CREATE INDEX api_keys_tenant_id_idx ON api_keys (tenant_id);
"""

REGISTRY = """
CREATE TABLE models (
    name       text PRIMARY KEY,
    family     text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE model_versions (
    version        text PRIMARY KEY,
    model          text NOT NULL REFERENCES models (name),
    context_tokens integer NOT NULL CHECK (context_tokens > 0),
    manifest       jsonb NOT NULL,
    state          text NOT NULL DEFAULT 'staged'
                   CHECK (state IN ('staged', 'ready', 'retired')),
    created_at     timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX model_versions_model_idx ON model_versions (model);

CREATE TABLE deployments (
    name          text PRIMARY KEY,
    version       text NOT NULL REFERENCES model_versions (version),
    region        text NOT NULL,
    desired_state text NOT NULL DEFAULT 'running'
                  CHECK (desired_state IN ('running', 'draining')),
    created_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX deployments_version_idx ON deployments (version);

CREATE TABLE routes (
    model             text PRIMARY KEY,
    deployment        text NOT NULL REFERENCES deployments (name),
    max_output_tokens integer NOT NULL DEFAULT 0 CHECK (max_output_tokens >= 0),
    version           bigint NOT NULL,
    created_at        timestamptz NOT NULL DEFAULT now(),
    updated_at        timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX routes_deployment_idx ON routes (deployment);
"""

FLEET = """
CREATE TABLE replicas (
    replica_id     text PRIMARY KEY,
    boot_id        text NOT NULL,
    url            text NOT NULL,
    deployment     text NOT NULL REFERENCES deployments (name),
    region         text NOT NULL,
    version        text NOT NULL REFERENCES model_versions (version),
    backend        text NOT NULL,
    can_resume     boolean NOT NULL,
    state          text NOT NULL CHECK (state IN ('starting', 'loading', 'warming', 'ready',
                                                  'draining', 'stopped', 'lost')),
    kv_blocks      integer NOT NULL CHECK (kv_blocks >= 0),
    block_tokens   integer NOT NULL CHECK (block_tokens > 0),
    context_tokens integer NOT NULL CHECK (context_tokens > 0),
    sequences      integer NOT NULL CHECK (sequences > 0),
    beat_seq       bigint NOT NULL DEFAULT 0,
    last_beat_at   timestamptz NOT NULL,
    kv_blocks_free integer NOT NULL,
    running        integer NOT NULL DEFAULT 0,
    waiting        integer NOT NULL DEFAULT 0,
    steps          bigint NOT NULL DEFAULT 0,
    registered_at  timestamptz NOT NULL
);
CREATE INDEX replicas_deployment_idx ON replicas (deployment);

CREATE TABLE journal_positions (
    boot_id    text PRIMARY KEY,
    replica_id text NOT NULL,
    acked      bigint NOT NULL DEFAULT 0 CHECK (acked >= 0),
    updated_at timestamptz NOT NULL DEFAULT now()
);
"""

AUDIT_LOG = """
CREATE TABLE audit_log (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT now(),
    actor   text NOT NULL,
    action  text NOT NULL,
    subject text NOT NULL,
    detail  jsonb NOT NULL
);
CREATE INDEX audit_log_subject_idx ON audit_log (subject);
"""

# A rule that only code keeps is one stray statement from broken; these two hold for psql too.
TRIGGERS = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;

CREATE TRIGGER audit_log_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE FUNCTION keep_model_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.version, NEW.model, NEW.context_tokens, NEW.manifest, NEW.created_at)
       IS DISTINCT FROM
       (OLD.version, OLD.model, OLD.context_tokens, OLD.manifest, OLD.created_at) THEN
        RAISE EXCEPTION 'model version % is immutable but for its state', OLD.version
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER model_versions_immutable
    BEFORE UPDATE ON model_versions
    FOR EACH ROW EXECUTE FUNCTION keep_model_version();
"""


def upgrade() -> None:
    for statements in (CHANGE_CLOCK, TENANCY, REGISTRY, FLEET, AUDIT_LOG, TRIGGERS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
