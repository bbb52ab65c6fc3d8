"""The Lua of `store/lua`, as function libraries that a server loads once and keeps.

Functions and not scripts: a script builds its hundred closures anew at each call, which here
costs four times what it then does (measured on Valkey 9.1: 72 of 112 µs; a function, 3 µs).
The rules are written into the text from the same structs that the pure twins take, so that
a bound cannot differ between the two. A library's name holds the digest of its text:
gateways of different releases or rules each call their own.
"""

import hashlib
from functools import cache
from pathlib import Path

import msgspec

from core.bindings import BindingRules
from core.deaths import DeathRules
from core.dispatch import PoolRules
from core.limits import DEBT_MAX, LIMIT_MAX, UNITS, LimitRules
from core.retries import RetryRules

LUA = Path(__file__).parent / "lua"
DIGEST_LENGTH = 12

# What functions share, in the order in which it builds on each other.
LIMITS = ("clock", "buckets")
POOLS = (
    "clock",
    "pool_state",
    "prefix_index",
    "placement",
    "replicas",
    "fair_queue",
    "pool",
)


class Library(msgspec.Struct, frozen=True):
    """A function library's name and its whole text."""

    name: str
    text: str


class Function(msgspec.Struct, frozen=True):
    """A function by its name in the server, and the library to load where it is missing."""

    name: bytes
    library: Library


class DispatchFunctions(msgspec.Struct, frozen=True, kw_only=True):
    """Those of tenants' limits and those of pools, each under one set of rules."""

    admit: Function
    look: Function
    charge: Function
    finish_tenant: Function
    cancel_tenant: Function
    arm: Function
    renew: Function
    finish_pool: Function
    cancel_pool: Function

    @property
    def libraries(self) -> tuple[Library, Library]:
        """The two that hold them all."""
        return self.admit.library, self.arm.library


def dispatch_functions(pool_rules: PoolRules, limit_rules: LimitRules) -> DispatchFunctions:
    """The functions under these rules."""
    limits = msgspec.to_builtins(limit_rules) | {
        "units": UNITS,
        "limit_max": LIMIT_MAX,
        "debt_max": DEBT_MAX,
    }
    pools = msgspec.to_builtins(pool_rules)
    of_tenants = ("admit", "look", "charge", "finish_tenant", "cancel_tenant")
    of_pools = ("arm", "renew", "finish_pool", "cancel_pool")
    return DispatchFunctions(
        **_functions("limits", of_tenants, LIMITS, {"LIMITS": limits}),
        **_functions("dispatch", of_pools, POOLS, {"RULES": pools}),
    )


@cache
def version_function() -> Function:
    """`raise_versions`: it knows no rules, for who does nothing but push versions."""
    return _functions("versions", ("raise_versions",), (), {})["raise_versions"]


@cache
def bind_function(rules: BindingRules) -> Function:
    """`bind`, under these rules."""
    tables = {"BINDINGS": msgspec.to_builtins(rules)}
    return _functions("bindings", ("bind",), (), tables)["bind"]


class FailureFunctions(msgspec.Struct, frozen=True, kw_only=True):
    """Those about replicas that die, under one set of rules."""

    spend_retry: Function
    record_death: Function
    absolve_death: Function
    list_deaths: Function


def failure_functions(retries: RetryRules, deaths: DeathRules) -> FailureFunctions:
    """The functions under these rules."""
    names = ("spend_retry", "record_death", "absolve_death", "list_deaths")
    tables = {"RETRIES": msgspec.to_builtins(retries), "DEATHS": msgspec.to_builtins(deaths)}
    return FailureFunctions(**_functions("failure", names, ("clock", "deaths"), tables))


def _functions(
    label: str,
    names: tuple[str, ...],
    libraries: tuple[str, ...],
    tables: dict[str, dict[str, object]],
) -> dict[str, Function]:
    parts = [f"local {name} = {_table(rules)}" for name, rules in tables.items()]
    parts += [_read(f"lib/{library}.lua") for library in libraries]
    # Each in a block of its own: what only one of them uses is its own affair.
    parts += [f"do\n{_read(f'{name}.lua')}end" for name in names]
    body = "\n".join(parts)
    digest = hashlib.sha256(body.encode()).hexdigest()[:DIGEST_LENGTH]
    prefix = f"hw_{digest}_"
    register = (
        "local function register(name, body)\n"
        f"  redis.register_function('{prefix}' .. name, body)\n"
        "end"
    )
    library = Library(
        f"headworks_{label}_{digest}",
        f"#!lua name=headworks_{label}_{digest}\n{register}\n{body}\n",
    )
    return {name: Function(f"{prefix}{name}".encode(), library) for name in names}


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
