"""Responses that are kept for `previous_response_id`.

Revision ID: 0012
Revises: 0011
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# `body` is JSON, sealed under the key `key_id` where that is not empty; `bytes` is its size as
# the prompt of a successor will hold it. No foreign keys: nothing here may lock a tenant's row,
# and a row outlives neither its day nor a deletion.
RESPONSES = """
CREATE TABLE responses (
    id          text PRIMARY KEY,
    tenant_id   text NOT NULL,
    previous_id text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    key_id      text NOT NULL,
    nonce       bytea NOT NULL,
    body        bytea NOT NULL,
    bytes       bigint NOT NULL
);
CREATE INDEX responses_expires_at_idx ON responses (expires_at);
"""

# What a tenant has said about keeping its responses; without a row, they are kept.
POLICIES = """
CREATE TABLE response_policies (
    tenant_id  text PRIMARY KEY,
    keep       boolean NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
"""


def upgrade() -> None:
    for statements in (RESPONSES, POLICIES):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
