"""Tables as SQLAlchemy Core describes them: the ledger's here, others in `schema_registry`.

A description for Alembic and for filtered lists, not a mapper. What cannot be said here is
in the migrations: triggers, functions, storage parameters.
"""

from sqlalchemy import MetaData

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)
