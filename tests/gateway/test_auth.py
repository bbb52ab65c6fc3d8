"""The cache of keys: what it refuses, how long it remembers, and how fast it forgets."""

import asyncio

import pytest

from core.errors import Code, RefusedError
from core.ids import KeyId, TenantId
from core.tenancy import KeyRecord, Tenant, key_digest, mint_key
from core.tickets import Limits
from gateway.auth import Authenticator, AuthLimits, Identity, SourceAwayError, TenancyChanges

pytestmark = pytest.mark.anyio

PEPPER = b"pepper"
KEY = mint_key(bytes(range(25)))
OTHER_KEY = mint_key(bytes(range(1, 26)))


def a_tenant(**changes: object) -> Tenant:
    fields: dict[str, object] = {
        "id": TenantId("ten_1"),
        "name": "one",
        "salt": b"s" * 16,
        "limits": Limits(),
        "weight": 1,
        "hard_cap_micro": None,
        "disabled": False,
        "version": 1,
    }
    return Tenant(**(fields | changes))


def a_key(**changes: object) -> KeyRecord:
    fields: dict[str, object] = {
        "id": KeyId("key_1"),
        "tenant_id": TenantId("ten_1"),
        "name": "main",
        "revoked": False,
        "version": 2,
    }
    return KeyRecord(**(fields | changes))


class MemoryKeys:
    """Keys in memory, with a change log, that can be away."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[KeyRecord, Tenant]] = {
            key_digest(PEPPER, KEY): (a_key(), a_tenant())
        }
        self.log: list[KeyRecord | Tenant] = []
        self.away = False
        self.lookups = 0
        self.read = asyncio.Event()
        self.pause = asyncio.Event()
        self.pause.set()

    def change(self, row: KeyRecord | Tenant) -> None:
        self.log.append(row)
        for digest, (key, tenant) in self.rows.items():
            if isinstance(row, KeyRecord) and row.id == key.id:
                self.rows[digest] = (row, tenant)
            if isinstance(row, Tenant) and row.id == tenant.id:
                self.rows[digest] = (key, row)

    async def key_by_digest(self, digest: bytes) -> tuple[KeyRecord, Tenant] | None:
        self.lookups += 1
        if self.away:
            raise SourceAwayError
        found = self.rows.get(digest)
        self.read.set()
        await self.pause.wait()
        return found

    async def changes(self, cursor: int | None) -> TenancyChanges:
        if self.away:
            raise SourceAwayError
        fresh = self.log[cursor:] if cursor is not None else []
        return TenancyChanges(
            keys=tuple(row for row in fresh if isinstance(row, KeyRecord)),
            tenants=tuple(row for row in fresh if isinstance(row, Tenant)),
            cursor=len(self.log),
        )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def keys() -> MemoryKeys:
    return MemoryKeys()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def auth(keys: MemoryKeys, clock: Clock) -> Authenticator:
    return Authenticator(source=keys, pepper=PEPPER, limits=AuthLimits(), clock_s=clock)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode("latin-1"))]


async def refusal(auth: Authenticator, headers: list[tuple[bytes, bytes]]) -> Code:
    with pytest.raises(RefusedError) as caught:
        await auth.authenticate(headers)
    return caught.value.refusal.code


async def test_either_header_carries_a_key(auth: Authenticator, keys: MemoryKeys) -> None:
    for headers in (
        bearer(KEY),
        [(b"authorization", b"bearer   " + KEY.encode())],
        [(b"x-api-key", KEY.encode())],
        [(b"authorization", b"Bearer nonsense"), (b"x-api-key", KEY.encode())],
    ):
        assert (await auth.authenticate(headers)).tenant.id == "ten_1"
    assert keys.lookups == 1


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic " + KEY.encode())],
        bearer("sk-something"),
        bearer(KEY[:-1] + ("0" if KEY[-1] != "0" else "1")),
        bearer(KEY.upper()),
        bearer(KEY + "\xff"),
        [(b"x-api-key", b"\xff\xfe")],
    ],
)
async def test_what_cannot_be_a_key_is_refused_without_a_look_up(
    auth: Authenticator, keys: MemoryKeys, headers: list[tuple[bytes, bytes]]
) -> None:
    assert await refusal(auth, headers) is Code.INVALID_KEY
    assert keys.lookups == 0


async def test_unknown_key_is_remembered_briefly(
    auth: Authenticator, keys: MemoryKeys, clock: Clock
) -> None:
    for _ in range(3):
        assert await refusal(auth, bearer(OTHER_KEY)) is Code.INVALID_KEY
    assert keys.lookups == 1
    clock.now_s = 2.1
    assert await refusal(auth, bearer(OTHER_KEY)) is Code.INVALID_KEY
    assert keys.lookups == 2


async def test_new_key_is_known_after_one_poll(auth: Authenticator, keys: MemoryKeys) -> None:
    await auth.poll()
    assert await refusal(auth, bearer(OTHER_KEY)) is Code.INVALID_KEY
    new = a_key(id="key_2")
    keys.rows[key_digest(PEPPER, OTHER_KEY)] = (new, a_tenant())
    keys.log.append(new)
    await auth.poll()
    assert (await auth.authenticate(bearer(OTHER_KEY))).key.id == "key_2"


async def test_revoked_key_dies_at_the_next_poll(auth: Authenticator, keys: MemoryKeys) -> None:
    await auth.poll()
    await auth.authenticate(bearer(KEY))
    keys.change(a_key(revoked=True, version=3))
    assert (await auth.authenticate(bearer(KEY))).key.id == "key_1"  # not yet polled
    await auth.poll()
    assert await refusal(auth, bearer(KEY)) is Code.INVALID_KEY
    assert keys.lookups == 1


async def test_disabled_tenant_is_forbidden_and_limits_follow(
    auth: Authenticator, keys: MemoryKeys
) -> None:
    await auth.poll()
    await auth.authenticate(bearer(KEY))
    keys.change(a_tenant(limits=Limits(concurrency=3), version=3))
    await auth.poll()
    assert (await auth.authenticate(bearer(KEY))).tenant.limits.concurrency == 3
    keys.change(a_tenant(disabled=True, version=4))
    await auth.poll()
    assert await refusal(auth, bearer(KEY)) is Code.FORBIDDEN


async def test_stale_rows_serve_a_quarter_of_an_hour_without_postgres(
    auth: Authenticator, keys: MemoryKeys, clock: Clock
) -> None:
    await auth.poll()
    await auth.authenticate(bearer(KEY))
    keys.away = True
    clock.now_s = 899.0
    with pytest.raises(SourceAwayError):
        await auth.poll()
    assert (await auth.authenticate(bearer(KEY))).key.id == "key_1"
    assert await refusal(auth, bearer(OTHER_KEY)) is Code.UNAVAILABLE
    clock.now_s = 901.0
    assert await refusal(auth, bearer(KEY)) is Code.UNAVAILABLE
    keys.away = False
    await auth.poll()
    assert (await auth.authenticate(bearer(KEY))).key.id == "key_1"
    assert auth.confirmed_ago_s == 0.0


async def test_polling_keeps_rows_fresh(
    auth: Authenticator, keys: MemoryKeys, clock: Clock
) -> None:
    await auth.authenticate(bearer(KEY))
    for hour in range(1, 5):
        clock.now_s = hour * 3600.0
        await auth.poll()
        assert (await auth.authenticate(bearer(KEY))).key.id == "key_1"
    assert keys.lookups == 1


async def test_callers_share_one_look_up_and_may_leave_it(
    auth: Authenticator, keys: MemoryKeys
) -> None:
    keys.pause.clear()
    callers = [asyncio.create_task(auth.authenticate(bearer(KEY))) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    keys.pause.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(not isinstance(result, BaseException) for result in results[1:])
    assert keys.lookups == 1


async def test_row_read_before_a_polled_change_is_not_kept(
    auth: Authenticator, keys: MemoryKeys
) -> None:
    await auth.poll()
    keys.pause.clear()
    early = asyncio.create_task(auth.authenticate(bearer(KEY)))
    await keys.read.wait()  # it has read the row, and not yet answered
    keys.change(a_key(revoked=True, version=3))
    await auth.poll()
    keys.pause.set()
    await early
    assert await refusal(auth, bearer(KEY)) is Code.INVALID_KEY


async def test_again_reads_past_the_cache(auth: Authenticator, keys: MemoryKeys) -> None:
    await auth.authenticate(bearer(KEY))
    keys.change(a_tenant(weight=7, version=9))
    assert (await auth.authenticate(bearer(KEY))).tenant.weight == 1
    assert (await auth.again(bearer(KEY))).tenant.weight == 7
    assert (await auth.authenticate(bearer(KEY))).tenant.weight == 7


async def test_look_ups_under_way_and_entries_are_bounded(keys: MemoryKeys, clock: Clock) -> None:
    auth = Authenticator(
        source=keys,
        pepper=PEPPER,
        limits=AuthLimits(entries_max=3, lookups_max=2),
        clock_s=clock,
    )
    others = [mint_key(bytes([i] * 25)) for i in range(5)]
    for other in others:
        assert await refusal(auth, bearer(other)) is Code.INVALID_KEY
    assert len(auth._entries) == 3
    keys.pause.clear()
    waiting = [asyncio.create_task(auth.authenticate(bearer(other))) for other in others[:2]]
    await asyncio.sleep(0)
    assert await refusal(auth, bearer(KEY)) is Code.UNAVAILABLE
    keys.pause.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert auth._lookups == {}


@pytest.mark.parametrize("of_tenant", [False, True])
@pytest.mark.parametrize("of_key", [False, True])
def test_a_hard_limit_on_either_binds_what_the_key_spends(*, of_tenant: bool, of_key: bool) -> None:
    key, tenant = a_key(hard_capped=of_key), a_tenant(hard_capped=of_tenant)
    assert Identity(key=key, tenant=tenant).hard_capped is (of_tenant or of_key)
