"""Records of hits: written in batches, waiting while the database is away, counted when lost."""

import pytest

from core.safety.policy import Assigned, Policy
from gateway.auth import SourceAwayError
from gateway.metrics import Metrics
from gateway.safety import records
from gateway.safety.records import Noted, Records
from gateway.safety.sieve import Hit
from tests.support.safety_cases import a_rule

pytestmark = pytest.mark.anyio


class Database:
    def __init__(self):
        self.rows = []
        self.away = False

    async def write(self, rows):
        if self.away:
            raise SourceAwayError
        if any(row.text == "poison" for row in rows):
            raise ValueError(rows)
        self.rows += rows


def a_note(text="secret", *, keep_text=True):
    rule = a_rule()
    hit = Hit(0)
    for char in text:
        hit.grow(char)
    assigned = Assigned(name="p", version=3, policy=Policy(rules=(rule,)), keep_text=keep_text)
    return Noted(
        hit, rule, stage="output", choice=1, assigned=assigned, tenant_id="t", request_id="r",
        at_ms=5,
    )  # fmt: skip


def lost(metrics):
    return metrics.safety_records_dropped._value.get()


async def test_a_hit_is_written_as_it_is_by_then():
    database, metrics = Database(), Metrics()
    kept = Records(metrics, database.write)
    noted = a_note("sec\x00")
    kept.note(noted)
    noted.hit.grow("r")
    await kept.flush()
    (row,) = database.rows
    assert (row.text, row.chars, row.policy_version, row.choice) == ("sec\ufffdr", 5, 3, 1)
    assert a_note(keep_text=False).row().text is None
    assert a_note("a\ud83d").row().text == "a?"


async def test_a_row_that_cannot_be_written_keeps_no_others_from_it(monkeypatch):
    monkeypatch.setattr(records, "BATCH", 1)
    database, metrics = Database(), Metrics()
    kept = Records(metrics, database.write)
    for text in ("a", "poison", "b"):
        kept.note(a_note(text))
    await kept.flush()
    assert [row.text for row in database.rows] == ["a", "b"]
    assert lost(metrics) == 1


async def test_what_cannot_be_written_waits_and_what_does_not_fit_is_counted(monkeypatch):
    monkeypatch.setattr(records, "WAITING_MAX", 3)
    monkeypatch.setattr(records, "BATCH", 2)
    database, metrics = Database(), Metrics()
    kept = Records(metrics, database.write)
    database.away = True
    for _ in range(5):
        kept.note(a_note())
    with pytest.raises(SourceAwayError):
        await kept.flush()
    assert lost(metrics) == 2
    database.away = False
    await kept.flush()
    assert len(database.rows) == 3


async def test_a_gateway_that_ends_tries_once_and_counts_what_is_lost():
    database, metrics = Database(), Metrics()
    kept = Records(metrics, database.write)
    kept.note(a_note())
    await kept.close()
    assert (len(database.rows), lost(metrics)) == (1, 0)
    database.away = True
    kept.note(a_note())
    await kept.close()
    assert lost(metrics) == 1
