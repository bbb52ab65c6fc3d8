"""Outside providers, and their keys, encrypted.

Revision ID: 0009
Revises: 0008
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# A key is there whole or not at all, and never in the clear. `settings` holds what differs from
# the defaults, which are the code's: older gateways pass over fields that they do not know.
PROVIDERS = """
CREATE TABLE providers (
    name       text PRIMARY KEY,
    dialect    text NOT NULL,
    base_url   text NOT NULL,
    key_id     text,
    nonce      bytea,
    sealed     bytea,
    settings   jsonb NOT NULL DEFAULT '{}',
    version    bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT providers_dialect_check CHECK (dialect IN ('openai', 'anthropic')),
    CONSTRAINT providers_key_check CHECK (num_nulls(key_id, nonce, sealed) IN (0, 3))
);
"""

# What a table leads to exists.
TARGETS = """
ALTER TABLE route_targets ADD CONSTRAINT route_targets_provider_fkey
    FOREIGN KEY (provider) REFERENCES providers (name);
"""


def upgrade() -> None:
    op.execute(PROVIDERS)
    op.execute(TARGETS)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
