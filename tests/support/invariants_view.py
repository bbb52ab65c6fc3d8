"""All that the database holds of some tenants' money, read in one statement: one snapshot."""

import json
from datetime import date
from typing import Any

import msgspec

from core.money import Price
from store.postgres import Connection

Row = dict[str, Any]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Rows as the database has them; numbers keep the type that its columns give them."""

    now_us: int
    accounts: dict[str, Row]
    entries: dict[str, list[Row]]  # by tenant, in their order
    requests: dict[str, Row]
    refusals: dict[str, Row]
    caps: list[Row]
    windows: dict[tuple[str, str, str, str], Row]  # by tenant, key, period and first day
    prices: dict[str, Price]
    float_columns: list[str]  # of money or tokens, that are not whole numbers

    def of(self, request_id: str) -> list[Row]:
        """A request's entries, in their order."""
        tenant = self.requests[request_id]["tenant_id"]
        return [entry for entry in self.entries[tenant] if entry["request_id"] == request_id]


_READ = """
SELECT json_build_object(
  'now_us', ledger_microseconds(clock_timestamp()),
  'accounts', (SELECT json_agg(a) FROM accounts AS a WHERE a.tenant_id = ANY (%(tenants)s)),
  'entries', (SELECT json_agg(e ORDER BY e.tenant_id, e.seq) FROM (
      SELECT e.*, ledger_microseconds(e.at) AS at_us,
             ROW (e.seq, e.request_id, e.kind, e.reserved_delta_micro, e.posted_delta_micro,
                  e.credit_delta_micro, e.reserved_micro, e.posted_micro, e.credit_micro,
                  e.adjustment_id, e.reason, e.author, ledger_microseconds(e.at))::text AS line
      FROM entries AS e WHERE e.tenant_id = ANY (%(tenants)s)) AS e),
  'requests', (SELECT json_agg(q) FROM requests AS q WHERE q.tenant_id = ANY (%(tenants)s)),
  'refusals', (SELECT json_agg(f) FROM refusals AS f WHERE f.tenant_id = ANY (%(tenants)s)),
  'caps', (SELECT json_agg(c) FROM caps AS c WHERE c.tenant_id = ANY (%(tenants)s)),
  'windows', (SELECT json_agg(w) FROM cap_windows AS w WHERE w.tenant_id = ANY (%(tenants)s)),
  'prices', (SELECT json_agg(p) FROM prices AS p),
  'float_columns', (
      SELECT json_agg(t.relname || '.' || c.attname || ' ' || c.atttypid::regtype)
      FROM pg_attribute AS c
      JOIN pg_class AS t ON t.oid = c.attrelid AND t.relkind IN ('r', 'p', 'v', 'c')
      WHERE t.relnamespace = 'public'::regnamespace AND c.attnum > 0 AND NOT c.attisdropped
        AND c.attname ~ '_(micro|tokens|delta)$'
        AND c.atttypid NOT IN ('bigint'::regtype, 'integer'::regtype)))
"""


async def read_view(conn: Connection, tenants: list[str]) -> View:
    """Everything of these tenants at one moment."""
    cursor = await conn.execute(_READ, {"tenants": tenants})
    found = await cursor.fetchone()
    assert found is not None
    rows = found[0] if isinstance(found[0], dict) else json.loads(found[0])
    entries: dict[str, list[Row]] = {tenant: [] for tenant in tenants}
    for entry in rows["entries"] or []:
        entries[entry["tenant_id"]].append(entry)
    return View(
        now_us=rows["now_us"],
        accounts={row["tenant_id"]: row for row in rows["accounts"] or []},
        entries=entries,
        requests={row["request_id"]: row for row in rows["requests"] or []},
        refusals={row["request_id"]: row for row in rows["refusals"] or []},
        caps=rows["caps"] or [],
        windows={
            (row["tenant_id"], row["key_id"], row["period"], row["starts"]): row
            for row in rows["windows"] or []
        },
        prices={row["id"]: _price(row) for row in rows["prices"] or []},
        float_columns=rows["float_columns"] or [],
    )


def day_of(row: Row) -> date:
    """The day that a request counts on, or a window or cap starts."""
    return date.fromisoformat(row["day"] if "day" in row else row["since"])


def _price(row: Row) -> Price:
    return Price(**{name: row[name] for name in Price.__struct_fields__})
