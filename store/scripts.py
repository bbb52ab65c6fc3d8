"""The Lua scripts of `store/lua`, each joined with the libraries it uses and with the rules.

The rules are written into the text as a Lua table, from the same structs that the pure twins
take: a bound cannot differ between the two.
"""

import hashlib
from functools import cache
from pathlib import Path

import msgspec

from core.dispatch import PoolRules
from core.limits import DEBT_MAX, LIMIT_MAX, UNITS, LimitRules

LUA = Path(__file__).parent / "lua"
TENANT_SWEEP_MAX = 64  # forgotten tickets cleared away by one call; they no longer count before

# Joined before the script, in this order.
TENANT_LIBRARIES = ("buckets",)
POOL_LIBRARIES = ("pool_state", "prefix_index", "placement", "fair_queue", "pool")


class Script(msgspec.Struct, frozen=True):
    """A script's whole text, and the digest by which the server knows it."""

    name: str
    text: str
    sha: bytes


class Scripts(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, under one set of rules."""

    admit: Script
    charge: Script
    finish_tenant: Script
    cancel_tenant: Script
    arm: Script
    renew: Script
    finish_pool: Script
    cancel_pool: Script
    raise_versions: Script

    def all(self) -> tuple[Script, ...]:
        """Each script, to load them into a server."""
        return msgspec.structs.astuple(self)


def load_scripts(pool_rules: PoolRules, limit_rules: LimitRules) -> Scripts:
    """The scripts under these rules."""
    tenant = msgspec.to_builtins(limit_rules) | {
        "units": UNITS,
        "limit_max": LIMIT_MAX,
        "debt_max": DEBT_MAX,
        "sweep_max": TENANT_SWEEP_MAX,
    }
    pool = msgspec.to_builtins(pool_rules)
    return Scripts(
        admit=_script("admit", TENANT_LIBRARIES, tenant),
        charge=_script("charge", TENANT_LIBRARIES, tenant),
        finish_tenant=_script("finish_tenant", TENANT_LIBRARIES, tenant),
        cancel_tenant=_script("cancel_tenant", TENANT_LIBRARIES, tenant),
        arm=_script("arm", POOL_LIBRARIES, pool),
        renew=_script("renew", POOL_LIBRARIES, pool),
        finish_pool=_script("finish_pool", POOL_LIBRARIES, pool),
        cancel_pool=_script("cancel_pool", POOL_LIBRARIES, pool),
        raise_versions=version_script(),
    )


def version_script() -> Script:
    """The one script that knows no rules, for who does nothing but push versions."""
    return _script("raise_versions", (), {})


def _script(name: str, libraries: tuple[str, ...], rules: dict[str, object]) -> Script:
    parts = [f"local RULES = {_table(rules)}"]
    parts += [_read(f"lib/{library}.lua") for library in libraries]
    text = "\n".join([*parts, _read(f"{name}.lua")])
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, digest.encode())


def _table(rules: dict[str, object]) -> str:
    """A Lua table of integers and of such tables."""
    fields = (
        f"{name} = {_table(value) if isinstance(value, dict) else value}"
        for name, value in sorted(rules.items())
    )
    return "{" + ", ".join(fields) + "}"


@cache
def _read(path: str) -> str:
    return (LUA / path).read_text()
