"""Settings: one frozen struct for each process, read once in its `__main__`.

Field `gateway_port` is read from `HEADWORKS_GATEWAY_PORT`; `database_url` and `redis_url`
also answer to the plain `DATABASE_URL` and `REDIS_URL`. A missing or bad value stops the
start and says which. An unknown `HEADWORKS_` name is ignored: processes share environments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Settings = TypeVar("Settings", bound=msgspec.Struct)

PREFIX = "HEADWORKS_"
PLAIN_NAMES = ("database_url", "redis_url")


class SettingsError(Exception):
    """A setting is missing or does not parse; the message names it."""


def read_settings(kind: type[Settings], environ: Mapping[str, str]) -> Settings:
    """Build `kind` from the environment. Raises SettingsError."""
    found: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        value = environ.get(env_name(field.name), "")
        if not value and field.name in PLAIN_NAMES:
            value = environ.get(field.name.upper(), "")
        if value:
            found[field.name] = value
        elif field.required:
            raise SettingsError(f"{env_name(field.name)} is not set")
    try:
        return msgspec.convert(found, kind, strict=False, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise SettingsError(_rename(str(error))) from error


def env_name(field: str) -> str:
    """`gateway_port` -> `HEADWORKS_GATEWAY_PORT`."""
    return PREFIX + field.upper()


def _custom(kind: type, value: Any) -> object:
    return kind(value) if kind is Path else value


def _rename(message: str) -> str:
    # msgspec says "Expected `int`, got `str` - at `$.gateway_port`".
    problem, _, path = message.partition(" - at `$.")
    name = path.rstrip("`")
    return f"{env_name(name)}: {problem}" if name else problem
