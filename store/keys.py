"""Every key in Valkey, named in one place.

A hash tag for each tenant and one for each pool, so that a script's keys share a slot and
pools can be spread over servers. What each key holds is told in the headers of `store/lua`.
"""

# Of what the functions keep in a pool. Releases that disagree on it each have a pool of their own
# while one replaces the other; replicas' reports keep their accounts honest meanwhile.
POOL_LAYOUT = 2

POOL_PARTS = (
    "state",
    "replicas",
    "tickets",
    "owned",
    "gateways",
    "granted",
    "unacked",
    "unreported",
    "fifo",
    "interactive",
    "standard",
    "batch",
    "counters",
    "prefixes",
    "recency",
    "rooms",
    "lives",
    "open",
)
TENANT_PARTS = ("scopes", "held", "tickets", "idle", "versions")

ROUTE_VERSIONS = b"versions:routes"  # hash: public model name -> newest version pushed

RETRY_KEYS = (b"{retries}:budget",)  # the fleet's, as the suspects of deaths are
DEATH_KEYS = (b"{deaths}:suspects", b"{deaths}:until")


def answer_key(tenant: str, slot: int) -> bytes:
    """Where one of a tenant's answers is kept to be given again: its name, then the answer."""
    return f"{{answers:{tenant}}}:{slot}".encode()


def tenant_keys(tenant: str) -> tuple[bytes, ...]:
    """The keys of a tenant's scripts, in `TENANT_PARTS` order."""
    return tuple(f"{{t:{tenant}}}:{part}".encode() for part in TENANT_PARTS)


def pool_keys(pool: str) -> tuple[bytes, ...]:
    """The keys of a pool's scripts, in `POOL_PARTS` order."""
    return tuple(f"{{p:{pool}}}:{POOL_LAYOUT}:{part}".encode() for part in POOL_PARTS)


def wake_channel(gateway: str) -> bytes:
    """Where a gateway incarnation hears that a pool has a grant for it."""
    return f"wake:{gateway}".encode()


def binding_keys(conversation: str) -> tuple[bytes, ...]:
    """Where a conversation's target is kept."""
    return (f"{{c:{conversation}}}:target".encode(),)
