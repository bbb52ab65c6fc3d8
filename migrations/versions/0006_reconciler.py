"""Where the reconciler has come to, and the differences it has found.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# A feed's place: a time and, among the rows of one time, a name; or a name alone. Words heard
# before the reconciler's first day are for the feed of requests, which passes over them all.
# `contact` is since when somebody has listened to workers without a pause.
CURSORS = """
CREATE TABLE reconcile_cursors (
    feed     text PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT now(),
    place    text NOT NULL DEFAULT '',
    moved_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO reconcile_cursors (feed)
VALUES ('words'), ('overdue'), ('requests'), ('accounts'), ('contact');
"""

# An account's entries are verified once, in order, from where they were left.
ACCOUNTS = """
CREATE TABLE reconciled_accounts (
    tenant_id      text PRIMARY KEY,
    seq            bigint NOT NULL,
    reserved_micro bigint NOT NULL,
    posted_micro   bigint NOT NULL,
    credit_micro   bigint NOT NULL,
    link           bytea
);
"""

# No row is open twice for one kind and subject. Raised is told; before that, only noticed.
DIFFERENCES = """
CREATE TABLE differences (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text NOT NULL,
    subject     text NOT NULL,
    detail      text NOT NULL,
    measure     bigint NOT NULL DEFAULT 0,
    noticed_at  timestamptz NOT NULL DEFAULT now(),
    raised_at   timestamptz,
    looked_at   timestamptz,
    resolved_at timestamptz,
    resolution  text,
    note        text NOT NULL DEFAULT '',
    CONSTRAINT differences_resolution_check
        CHECK (resolution IN ('corrected', 'gone', 'closed')),
    CONSTRAINT differences_resolved_check
        CHECK ((resolved_at IS NULL) = (resolution IS NULL))
);
CREATE UNIQUE INDEX differences_open_key ON differences (kind, subject)
    WHERE resolved_at IS NULL;
CREATE INDEX differences_unraised_idx ON differences (noticed_at)
    WHERE resolved_at IS NULL AND raised_at IS NULL;
CREATE INDEX differences_closed_idx ON differences (kind, subject) WHERE resolution = 'closed';
CREATE INDEX differences_resolved_at_idx ON differences (resolved_at);
"""

# A word that says more of what was said before is heard anew.
HEARD = """
CREATE FUNCTION witness_heard_anew() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.recorded_at := now();
    RETURN NEW;
END $$;
CREATE TRIGGER witnesses_heard_anew BEFORE UPDATE ON witnesses
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION witness_heard_anew();
"""

# What was heard since. BRIN, for a word is written once and mostly at the table's end: it costs
# the ledger next to nothing, and keeps a repeated word's row on its page (HOT).
WORDS = """
CREATE INDEX witnesses_recorded_at_idx ON witnesses
    USING brin (recorded_at) WITH (pages_per_range = 32, autosummarize = on);
"""


def upgrade() -> None:
    for statements in (CURSORS, ACCOUNTS, DIFFERENCES, HEARD, WORDS):
        op.execute(statements)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
