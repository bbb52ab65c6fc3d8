"""Faults planted in the ledger's own SQL, each with the invariant that must see it.

A function is altered by replacing a piece of its text, which must be there; or a trigger or a
constraint is put in the way of what it does.
"""

import re
from collections.abc import Callable

import msgspec
import psycopg

Plant = Callable[["psycopg.Connection[tuple[object, ...]]"], None]


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with this ledger, how it is made so, and who must notice."""

    what: str
    invariant: int
    plant: Plant


def altered(function: str, piece: str, instead: str) -> Plant:
    """The function with a piece of its body replaced. White space is as one blank."""

    def plant(conn: "psycopg.Connection[tuple[object, ...]]") -> None:
        row = conn.execute(
            "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = %s", (function,)
        ).fetchone()
        assert row is not None, f"there is no {function}"
        pattern = r"\s+".join(map(re.escape, piece.split()))
        text, times = re.subn(pattern, lambda _: instead, str(row[0]))
        assert times, f"{function} says nothing like {piece}"
        conn.execute(text.encode())

    return plant


def said(*statements: str) -> Plant:
    """These statements, by a superuser."""

    def plant(conn: "psycopg.Connection[tuple[object, ...]]") -> None:
        for statement in statements:
            conn.execute(statement.encode())

    return plant


def before_row(table: str, events: str, body: str) -> Plant:
    """A trigger for each row that does this with it."""
    return said(
        f"CREATE FUNCTION planted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$",
        f"CREATE TRIGGER planted BEFORE {events} ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION planted()",
    )


PLANTED = [
    Planted(
        what="an ending posts more than the request's row says",
        invariant=1,
        plant=before_row(
            "usage", "INSERT", "NEW.billed_micro := NEW.billed_micro / 2; RETURN NEW;"
        ),
    ),
    Planted(
        what="a hard cap that nobody looks at",
        invariant=2,
        plant=altered(
            "ledger_grant", "IF v_room >= p_floor THEN", "v_room := p_wanted; IF true THEN"
        ),
    ),
    Planted(
        what="a sweeper that leaves requests open",
        invariant=3,
        plant=altered(
            "ledger_expire",
            "r.request_id = ANY (p_request_ids) ORDER BY r.request_id",
            "false ORDER BY r.request_id",
        ),
    ),
    Planted(
        what="a bill over its reservation in one entry",
        invariant=4,
        plant=altered("ledger_end", "least(b.bill, b.reserved_micro), 0", "b.bill, 0"),
    ),
    Planted(
        what="a post doubled",
        invariant=5,
        plant=altered("ledger_end", "least(b.bill, b.reserved_micro), 0", "2 * b.bill, 0"),
    ),
    Planted(
        what="a top-up that adds to what is held",
        invariant=5,
        plant=altered("ledger_top_up", "v_more.total_micro - v_more.held", "v_more.total_micro"),
    ),
    Planted(
        what="other words under a taken id taken for the same",
        invariant=6,
        plant=altered("ledger_reserve_one", "IF v_known.is_same THEN", "IF true THEN"),
    ),
    Planted(
        what="a refusal forgotten",
        invariant=7,
        plant=before_row("refusals", "INSERT", "RETURN NULL;"),
    ),
    Planted(
        what="a post on a reservation that has expired",
        invariant=8,
        plant=before_row(
            "entries",
            "INSERT",
            "IF NEW.kind = 'correction' THEN NEW.kind := 'settle'; END IF; RETURN NEW;",
        ),
    ),
    Planted(
        what="a living gateway taken for a silent one",
        invariant=8,
        plant=before_row("gateways", "INSERT OR UPDATE", "NEW.retired := true; RETURN NEW;"),
    ),
    Planted(
        what="a number left out",
        invariant=9,
        plant=altered(
            "ledger_post",
            "a.entries + row_number() OVER upto",
            "a.entries + 2 * row_number() OVER upto",
        ),
    ),
    Planted(
        what="a link that leaves out the one before",
        invariant=9,
        plant=altered("ledger_post", "sha256(a.head || convert_to", "sha256('' || convert_to"),
    ),
    Planted(
        what="entries that anybody may change",
        invariant=10,
        plant=said("ALTER TABLE entries DISABLE TRIGGER entries_append_only"),
    ),
    Planted(
        what="a balance in floating point",
        invariant=11,
        plant=said("ALTER TABLE cap_windows ALTER COLUMN posted_micro TYPE double precision"),
    ),
    Planted(
        what="a reserve that was answered and is not there",
        invariant=12,
        plant=before_row("reservations", "INSERT", "RETURN NULL;"),
    ),
    Planted(
        what="a counter that misses what is spent",
        invariant=13,
        plant=before_row(
            "cap_windows", "UPDATE", "NEW.posted_micro := OLD.posted_micro; RETURN NEW;"
        ),
    ),
    Planted(
        what="a request that changes its price as it ends",
        invariant=15,
        plant=before_row("usage", "INSERT", "NEW.price_id := 'price_odd'; RETURN NEW;"),
    ),
]
