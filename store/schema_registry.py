"""The control plane's tables as SQLAlchemy Core describes them: tenants, registry, fleet, audit.

Importing this adds them to `store.schema.metadata`. Triggers are in the migrations.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.schema import metadata

_TIME = DateTime(timezone=True)

change_clock = Table(
    "change_clock",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
    CheckConstraint("stream IN ('tenancy', 'routing')", name="stream"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("salt", LargeBinary, nullable=False),
    Column("output_policy", Text, nullable=False, server_default="clamp"),
    Column("overload_output_tokens", Integer, nullable=False, server_default="0"),
    Column("weight", Integer, nullable=False, server_default="1"),
    Column("disabled", Boolean, nullable=False, server_default="false"),
    Column("price_book", Text, ForeignKey("price_books.id"), nullable=False, server_default="list"),
    Column("tier", Text, nullable=False, server_default="standard"),
    Column("billed", Boolean, nullable=False, server_default="true"),
    Column("version", BigInteger, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    Column("updated_at", _TIME, nullable=False, server_default="now()"),
    UniqueConstraint("name"),
    CheckConstraint("octet_length(salt) = 16", name="salt"),
    CheckConstraint("output_policy IN ('clamp', 'refuse')", name="output_policy"),
    CheckConstraint("overload_output_tokens >= 0", name="overload_output_tokens"),
    Index(None, "version"),
    Index(None, "tier"),
    Index(None, "price_book"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("public", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    Column("revoked_at", _TIME),
    UniqueConstraint("digest"),
    CheckConstraint("octet_length(digest) = 32", name="digest"),
    Index(None, "version"),
    Index(None, "tenant_id"),
)

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("family", Text, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("version", Text, primary_key=True),
    Column("model", Text, ForeignKey("models.name"), nullable=False),
    Column("context_tokens", Integer, nullable=False),
    Column("manifest", JSONB, nullable=False),
    Column("state", Text, nullable=False, server_default="staged"),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    CheckConstraint("state IN ('staged', 'ready', 'retired')", name="state"),
    Index(None, "model"),
)

deployments = Table(
    "deployments",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Text, ForeignKey("model_versions.version"), nullable=False),
    Column("region", Text, nullable=False),
    Column("desired_state", Text, nullable=False, server_default="running"),
    Column("replicas_desired", Integer),
    Column("replicas_warm", Integer, nullable=False, server_default="0"),
    Column("launcher", Text, nullable=False, server_default="external"),
    Column("spec", JSONB, nullable=False, server_default="{}"),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    CheckConstraint("desired_state IN ('running', 'draining')", name="desired_state"),
    CheckConstraint("replicas_desired >= 0", name="replicas_desired"),
    CheckConstraint("replicas_warm >= 0", name="replicas_warm"),
    CheckConstraint("launcher IN ('external', 'local')", name="launcher"),
    Index(None, "version"),
)

routes = Table(
    "routes",
    metadata,
    Column("tenant_id", Text, primary_key=True, server_default=""),
    Column("model", Text, primary_key=True),
    Column("alias", Text, nullable=False, server_default=""),
    Column("targets", JSONB, nullable=False, server_default="[]"),
    Column("fallbacks", JSONB, nullable=False, server_default="[]"),
    Column("max_output_tokens", Integer, nullable=False, server_default="0"),
    Column("version", BigInteger, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    Column("updated_at", _TIME, nullable=False, server_default="now()"),
)

route_targets = Table(
    "route_targets",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("deployment", Text, ForeignKey("deployments.name")),
    Column("provider", Text, ForeignKey("providers.name")),
    ForeignKeyConstraint(
        ["tenant_id", "model"],
        ["routes.tenant_id", "routes.model"],
        name="route_targets_route_fkey",
        ondelete="CASCADE",
    ),
    CheckConstraint("(deployment IS NULL) <> (provider IS NULL)", name="kind"),
    Index(None, "deployment"),
    Index(None, "provider"),
)

model_access = Table(
    "model_access",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("key_id", Text, primary_key=True, server_default=""),
    Column("models", ARRAY(Text), nullable=False),
    Column("updated_at", _TIME, nullable=False, server_default="now()"),
)

replicas = Table(
    "replicas",
    metadata,
    Column("replica_id", Text, primary_key=True),
    Column("boot_id", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("deployment", Text, ForeignKey("deployments.name"), nullable=False),
    Column("region", Text, nullable=False),
    Column("version", Text, ForeignKey("model_versions.version"), nullable=False),
    Column("backend", Text, nullable=False),
    Column("can_resume", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("kv_blocks", Integer, nullable=False),
    Column("block_tokens", Integer, nullable=False),
    Column("context_tokens", Integer, nullable=False),
    Column("sequences", Integer, nullable=False),
    Column("beat_seq", BigInteger, nullable=False, server_default="0"),
    Column("last_beat_at", _TIME, nullable=False),
    Column("kv_blocks_free", Integer, nullable=False),
    Column("running", Integer, nullable=False, server_default="0"),
    Column("waiting", Integer, nullable=False, server_default="0"),
    Column("steps", BigInteger, nullable=False, server_default="0"),
    Column("registered_at", _TIME, nullable=False),
    Column("started_at", _TIME),
    Column("ready_at", _TIME),
    Column("progress_at", _TIME, nullable=False, server_default="now()"),
    Column("drain_reason", Text, nullable=False, server_default=""),
    Column("drain_deadline_at", _TIME),
    CheckConstraint("(drain_reason = '') = (drain_deadline_at IS NULL)", name="drain"),
    Index(None, "deployment"),
)

journal_positions = Table(
    "journal_positions",
    metadata,
    Column("boot_id", Text, primary_key=True),
    Column("replica_id", Text, nullable=False),
    Column("acked", BigInteger, nullable=False, server_default="0"),
    Column("updated_at", _TIME, nullable=False, server_default="now()"),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", _TIME, nullable=False, server_default="now()"),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", JSONB, nullable=False),
    Index(None, "subject"),
    Index(None, "actor", "id"),
    Index(None, "action", "id"),
    Index(None, "at"),
)
