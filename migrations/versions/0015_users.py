"""Users, sessions, scoped tokens.

Revision ID: 0015
Revises: 0014
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# A user is disabled, never deleted: the audit log names them. `source` says who decides their
# roles: operators here, or the identity provider at every sign-in.
USERS = """
CREATE TABLE users (
    id           text PRIMARY KEY,
    email        text NOT NULL UNIQUE,
    name         text NOT NULL,
    password     text,
    roles        text[] NOT NULL,
    source       text NOT NULL DEFAULT 'local',
    disabled     boolean NOT NULL DEFAULT false,
    version      bigint NOT NULL DEFAULT 1,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    signed_in_at timestamptz,
    CONSTRAINT users_email_check CHECK (email = lower(email)),
    CONSTRAINT users_roles_check
        CHECK (roles <@ ARRAY['viewer', 'operator', 'billing', 'admin']),
    CONSTRAINT users_source_check CHECK (source IN ('local', 'oidc'))
);

CREATE TABLE user_identities (
    issuer     text NOT NULL,
    subject    text NOT NULL,
    user_id    text NOT NULL REFERENCES users (id),
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (issuer, subject)
);
CREATE INDEX user_identities_user_id_idx ON user_identities (user_id);
"""

# Of each only a keyed digest. `id` is their public name.
CREDENTIALS = """
CREATE TABLE sessions (
    digest     bytea PRIMARY KEY,
    id         text NOT NULL UNIQUE,
    user_id    text NOT NULL REFERENCES users (id),
    method     text NOT NULL,
    address    text NOT NULL,
    user_agent text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT sessions_digest_check CHECK (octet_length(digest) = 32),
    CONSTRAINT sessions_method_check CHECK (method IN ('password', 'oidc'))
);
CREATE INDEX sessions_user_id_idx ON sessions (user_id);

CREATE TABLE admin_tokens (
    id           text PRIMARY KEY,
    digest       bytea NOT NULL UNIQUE,
    user_id      text REFERENCES users (id),
    name         text NOT NULL,
    permissions  text[] NOT NULL,
    created_by   text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz,
    last_used_at timestamptz,
    revoked_at   timestamptz,
    CONSTRAINT admin_tokens_digest_check CHECK (octet_length(digest) = 32)
);
CREATE INDEX admin_tokens_user_id_idx ON admin_tokens (user_id);

CREATE TABLE invitations (
    user_id    text PRIMARY KEY REFERENCES users (id),
    digest     bytea NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT invitations_digest_check CHECK (octet_length(digest) = 32)
);
"""

# `name` is a user, or a slot of the bounded number that strangers' names and addresses share.
ATTEMPTS = """
CREATE TABLE sign_in_attempts (
    name     text PRIMARY KEY,
    failures integer NOT NULL DEFAULT 0,
    last_ms  bigint NOT NULL DEFAULT 0,
    until_ms bigint NOT NULL DEFAULT 0,
    CONSTRAINT sign_in_attempts_failures_check CHECK (failures >= 0)
);
"""

# The log is append-only since 0001, by trigger. Its filters need ways in.
AUDIT_LOG = """
CREATE INDEX audit_log_actor_id_idx ON audit_log (actor, id);
CREATE INDEX audit_log_action_id_idx ON audit_log (action, id);
CREATE INDEX audit_log_at_idx ON audit_log (at);
ALTER TABLE audit_log ENABLE ALWAYS TRIGGER audit_log_append_only;
"""


def upgrade() -> None:
    for statements in (USERS, CREDENTIALS, ATTEMPTS, AUDIT_LOG):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
