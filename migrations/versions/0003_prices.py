"""Price books, tiers and classes; prices for cache writes and reasoning; tenants' own terms.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

PRICE_BOOKS = """
CREATE TABLE price_books (
    id          text PRIMARY KEY,
    description text NOT NULL DEFAULT '',
    created_at  timestamptz NOT NULL DEFAULT now()
);
INSERT INTO price_books (id, description) VALUES ('list', 'The list prices, for everyone');
"""

# A price without a rate for cache writes or reasoning charged them as input and output.
PRICES = """
ALTER TABLE prices DISABLE TRIGGER prices_immutable;
ALTER TABLE prices
    ADD COLUMN book                 text NOT NULL DEFAULT 'list' REFERENCES price_books (id),
    ADD COLUMN tier                 text NOT NULL DEFAULT '',
    ADD COLUMN service_class        text NOT NULL DEFAULT '',
    ADD COLUMN cache_write_5m_micro bigint NOT NULL DEFAULT 0 CHECK (cache_write_5m_micro >= 0),
    ADD COLUMN cache_write_1h_micro bigint NOT NULL DEFAULT 0 CHECK (cache_write_1h_micro >= 0),
    ADD COLUMN reasoning_micro      bigint NOT NULL DEFAULT 0 CHECK (reasoning_micro >= 0);
UPDATE prices SET cache_write_5m_micro = input_micro, cache_write_1h_micro = input_micro,
                  reasoning_micro = output_micro;
ALTER TABLE prices ENABLE TRIGGER prices_immutable;
ALTER TABLE prices
    ALTER COLUMN cache_write_5m_micro DROP DEFAULT,
    ALTER COLUMN cache_write_1h_micro DROP DEFAULT,
    ALTER COLUMN reasoning_micro DROP DEFAULT,
    DROP CONSTRAINT prices_model_effective_ms_key,
    ADD CONSTRAINT prices_book_model_tier_service_class_effective_ms_key
        UNIQUE (book, model, tier, service_class, effective_ms);
INSERT INTO prices (id, model, currency, input_micro, cached_input_micro, output_micro,
                    request_micro, cache_write_5m_micro, cache_write_1h_micro, reasoning_micro,
                    effective_ms)
VALUES ('unpriced', '*', '', 0, 0, 0, 0, 0, 0, 0, 0);
"""

TENANTS = """
ALTER TABLE tenants
    ADD COLUMN price_book text NOT NULL DEFAULT 'list' REFERENCES price_books (id),
    ADD COLUMN tier       text NOT NULL DEFAULT 'standard',
    ADD COLUMN billed     boolean NOT NULL DEFAULT true;
CREATE INDEX tenants_price_book_idx ON tenants (price_book);
"""


def upgrade() -> None:
    for statements in (PRICE_BOOKS, PRICES, TENANTS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
