"""Limits of tiers, tenants, keys and models.

Revision ID: 0007
Revises: 0006
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# What each place says; NULL is not said, 0 unlimited. `id` is a tier's name, or a tenant's or a
# key's id; `model` '' is for all models together.
LIMITS = """
CREATE TABLE limits (
    subject               text NOT NULL,
    id                    text NOT NULL,
    model                 text NOT NULL DEFAULT '',
    requests_per_min      bigint,
    input_tokens_per_min  bigint,
    output_tokens_per_min bigint,
    concurrency           bigint,
    prompt_tokens_max     bigint,
    output_tokens_max     bigint,
    deadline_ms_max       bigint,
    PRIMARY KEY (subject, id, model),
    CONSTRAINT limits_subject_check CHECK (subject IN ('tier', 'tier_key', 'tenant', 'key')),
    CONSTRAINT limits_least_check CHECK (
        0 <= least(requests_per_min, input_tokens_per_min, output_tokens_per_min, concurrency,
                   prompt_tokens_max, output_tokens_max, deadline_ms_max))
);
CREATE VIEW limits_said AS
SELECT subject, id, jsonb_build_object(
           'subject', subject, 'model', model,
           'allowance', to_jsonb(l) - 'subject' - 'id' - 'model') AS said
  FROM limits l;
"""

# A tenant that was unlimited follows its tier from now on, which says nothing until it is told.
TENANTS = """
INSERT INTO limits (subject, id, requests_per_min, input_tokens_per_min, output_tokens_per_min,
                    concurrency)
SELECT 'tenant', id, nullif(requests_per_min, 0), nullif(input_tokens_per_min, 0),
       nullif(output_tokens_per_min, 0), nullif(concurrency, 0)
  FROM tenants
 WHERE greatest(requests_per_min, input_tokens_per_min, output_tokens_per_min, concurrency) > 0;
ALTER TABLE tenants
    DROP COLUMN requests_per_min,
    DROP COLUMN input_tokens_per_min,
    DROP COLUMN output_tokens_per_min,
    DROP COLUMN concurrency,
    ADD COLUMN output_policy text NOT NULL DEFAULT 'clamp',
    ADD CONSTRAINT tenants_output_policy_check CHECK (output_policy IN ('clamp', 'refuse'));
CREATE INDEX tenants_tier_idx ON tenants (tier);
"""


def upgrade() -> None:
    for statements in (LIMITS, TENANTS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
