"""Safety policies, and the record of what they did.

Revision ID: 0011
Revises: 0010
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# A version never changes: what a hit was judged by can be read for ever.
POLICIES = """
CREATE TABLE safety_policies (
    name       text NOT NULL,
    version    integer NOT NULL,
    rules      jsonb NOT NULL,
    hold_chars integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, version)
);
"""

# Without a version, the newest holds.
TENANTS = """
CREATE TABLE tenant_safety (
    tenant_id  text PRIMARY KEY REFERENCES tenants (id),
    policy     text NOT NULL,
    version    integer,
    keep_text  boolean NOT NULL DEFAULT false,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT tenant_safety_policy_fkey
        FOREIGN KEY (policy, version) REFERENCES safety_policies (name, version)
);
CREATE INDEX tenant_safety_policy_idx ON tenant_safety (policy);
"""

# No keys to other tables: a record must outlive whatever it tells of, and cost little.
HITS = """
CREATE TABLE safety_hits (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL,
    tenant_id      text NOT NULL,
    request_id     text NOT NULL,
    policy         text NOT NULL,
    policy_version integer NOT NULL,
    rule           text NOT NULL,
    stage          text NOT NULL,
    action         text NOT NULL,
    choice         integer NOT NULL,
    chars          integer NOT NULL,
    text           text
);
CREATE INDEX safety_hits_tenant_id_idx ON safety_hits (tenant_id, id);
"""


def upgrade() -> None:
    for statements in (POLICIES, TENANTS, HITS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
