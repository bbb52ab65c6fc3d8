"""Brings a database up to the newest schema, and says whether the two agree.

Synchronous, for a command line or the start of a test: `alembic upgrade head` as a function.
Safe to run twice at once: `migrations/env.py` holds an advisory lock.
"""

from pathlib import Path

import msgspec
import psycopg
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError


class MigrationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Read by `python -m store`."""

    database_url: str


MIGRATIONS = Path(__file__).parent.parent / "migrations"
CONNECT_TIMEOUT_S = "10"  # unless the address has its own; psycopg would try for two minutes


class MigrationError(Exception):
    """The database could not be brought up to date; the message says why, without its URL."""


def upgrade(database_url: str, revision: str = "head") -> None:
    """Run the migrations that `database_url` has not seen, each in its own transaction.

    Raises MigrationError.
    """
    try:
        command.upgrade(_config(database_url), revision)
    except DBAPIError as error:
        # The driver's own words; SQLAlchemy adds the statement and a link.
        raise MigrationError(str(error.orig).strip()) from error
    except (SQLAlchemyError, psycopg.Error, CommandError, ValueError) as error:
        # ValueError: a port that is no number.
        raise MigrationError(str(error)) from error


def check(database_url: str) -> None:
    """Raises alembic.util.CommandError when the database and `store.schema` differ."""
    command.check(_config(database_url))


def _config(database_url: str) -> Config:
    url = make_url(database_url)
    if "connect_timeout" not in url.query:
        url = url.update_query_dict({"connect_timeout": CONNECT_TIMEOUT_S})
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["database_url"] = url.render_as_string(hide_password=False)
    return config
