"""One gateway put together: opened in order, closed in the reverse of it.

Owns every connection and loop of the process. Invariant: it is closed only after every
request under way has ended and been settled, or the bound on waiting for that has passed.
"""

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from artifacts.store import ModelStore
from core import ids
from core.bindings import BindingRules
from core.deaths import DeathRules
from core.dispatch import PoolRules
from core.fair_queue import QueueRules
from core.retries import RetryRules
from core.secrets import read_key_ring
from core.tickets import ReplicaView
from gateway.auth import Authenticator, AuthLimits, SourceAwayError
from gateway.background import Background
from gateway.books import Books
from gateway.breaker import BreakerRules
from gateway.cached_answers import CachedAnswers
from gateway.claims import Claims
from gateway.grammars import GrammarChecks
from gateway.kept_responses import KeepingLimits, KeptResponses
from gateway.metrics import Metrics
from gateway.own_usage import OwnUsage
from gateway.prefixes import PrefixMemory
from gateway.prompts import PromptLimits, Prompts
from gateway.provider_client import Providers, http_client
from gateway.relay.endings import Endings
from gateway.relay.hold import HoldLimits
from gateway.relay.job import GenerationLimits, Parts
from gateway.relay.provider_job import ProviderParts
from gateway.relay.provider_target import ProviderTargets
from gateway.relay.relay import Relay
from gateway.relay.shared import RelayLimits, Shared
from gateway.relay.shortage import Shortage
from gateway.replica_health import ReplicaHealth
from gateway.routes import Routes
from gateway.safety.guard import Guards
from gateway.safety.records import Records
from gateway.sealing import AnswerSeal
from gateway.settings import GatewaySettings
from gateway.sources import PostgresSource
from gateway.spool import Spool
from gateway.worker_client import WorkerClient, WorkerLimits
from store.answer_cache import AnswerSlots
from store.bindings import Bindings
from store.dispatch import Dispatch, DispatchRules
from store.failures import FailureRules, Failures
from store.leases import assert_lease, retire_lease, spools_adopted
from store.ledger import Ledger
from store.postgres import Postgres, PostgresConfig, StoreAwayError

_log = logging.getLogger(__name__)

POSTGRES_CONNECTIONS = 4  # look-ups, polls, the lease; the ledger has lanes of its own
RESPONSES_CONNECTIONS = 4  # for kept responses
DAY_S = 86_400
POSTGRES_BLOCK_S = 5.0  # of any of those: a caller with an unknown key waits for one
LEASE_PARTS = 3
CONTACT_LOST_AFTER_POLLS = 6  # before readiness says so


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Gateway:
    """`open` it, use `relay`, `auth`, `routes` and `prompts`, `close` it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.id = ids.gateway_id(os.urandom(ids.ENTROPY_BYTES))
        self.metrics = Metrics()
        self.routes = Routes(
            settings.region,
            output_tokens_max=settings.output_tokens_max,
            no_replica_s=settings.no_replica_ms / 1000,
        )
        self.prompts = Prompts(ModelStore(Path(settings.models_dir)), PromptLimits(), now_ms)
        self._grammars = GrammarChecks(self.prompts)
        self._endings = Endings()
        self._beside: set[asyncio.Task[None]] = set()  # what generations leave behind
        self._background = Background()
        self._spool = Spool(Path(settings.spool_dir), self.id, bytes_max=settings.spool_bytes_max)
        self._health = ReplicaHealth(
            BreakerRules(failures=settings.breaker_failures, open_ms=settings.breaker_open_ms),
            lambda: time.monotonic_ns() // 1_000_000,
        )
        self._providers = Providers(
            read_key_ring(settings.provider_keys), http_client(), unix_s=lambda: now_ms() / 1000
        )
        self._workers = WorkerClient(
            secret=settings.internal_secret.encode(),
            subject=self.id,
            limits=_worker_limits(settings),
            now_ms=now_ms,
        )

    async def open(self) -> None:
        """Connect, take a lease, read the routes, follow the keys, start the loops.

        Raises StoreAwayError when Postgres does not answer in time, OSError for the spool.
        """
        settings = self.settings
        self._clock = asyncio.get_running_loop().time
        self._spool.open()
        await self._open_postgres()
        ring = read_key_ring(settings.responses_keys)
        seal = AnswerSeal(ring, os.urandom)
        self.kept_responses = KeptResponses(
            self._responses_postgres,
            ring,
            KeepingLimits(kept_s=settings.responses_days * DAY_S),
            os.urandom,
        )
        self.own_usage = OwnUsage(self._responses_postgres, self._clock)
        self._source = PostgresSource(self._postgres, settings.region)
        self.claims = Claims(
            self._postgres,
            kept_ms=settings.idempotency_kept_ms,
            bytes_max=settings.idempotency_bytes_max,
            new_holder=lambda: os.urandom(ids.ENTROPY_BYTES).hex(),
            seal=seal,
        )
        self.auth = Authenticator(
            source=self._source,
            pepper=settings.key_pepper.encode(),
            limits=AuthLimits(stale_s=settings.auth_stale_ms / 1000),
            clock_s=self._clock,
        )
        self._ledger = await Ledger.open(settings.database_url)
        self._books = Books(self._ledger, self._spool)
        self._records = Records(self.metrics, self._source.record_hits)
        await self._first_contact()
        self._dispatch = Dispatch(settings.redis_url, self.id, _dispatch_rules(settings))
        await self._dispatch.start()
        self._bindings = Bindings(
            settings.redis_url, BindingRules(idle_ms=settings.binding_idle_ms)
        )
        self._bindings.start()
        self._answer_slots = AnswerSlots(settings.redis_url, slots=settings.answer_cache_slots)
        self._answer_slots.start()
        self._answers = CachedAnswers(
            self._postgres,
            self._answer_slots,
            self.metrics,
            secret=_answers_key(settings),
            bytes_max=settings.answer_cache_bytes_max,
            seal=seal,
        )
        self._failures = Failures(settings.redis_url, _failure_rules(settings))
        self._failures.start()
        self.relay = Relay(self._shared())
        self._announce()
        self._start_loops()

    async def close(self) -> None:
        """End what is under way, settle it, give the lease back. Bounded."""
        await self.relay.drain()
        await self._background.close()
        await self._records.close()
        await self._last_words()
        await self._dispatch.close()
        await self._bindings.close()
        await self._answer_slots.close()
        for task in self._beside:
            task.cancel()
        await self._failures.close()
        await self._ledger.close()
        await self._spool.close()
        await self._retire_lease()
        await self._workers.close()
        await self._providers.close()
        await self._responses_postgres.close()
        await self._postgres.close()
        self._grammars.close()
        self.prompts.close()

    def reasons(self) -> dict[str, str]:
        """Why this gateway should get no traffic; nothing when it should."""
        reasons: dict[str, str] = {}
        lost_after_s = CONTACT_LOST_AFTER_POLLS * self.settings.poll_ms / 1000
        if self._clock() - self.routes.read_s > lost_after_s:
            reasons["postgres"] = "the routing view could not be read lately"
        if self._dispatch.degraded:
            reasons["valkey"] = "limits and placement are decided by this gateway alone"
        if not self.routes.ready_replicas:
            reasons["replicas"] = "no replica is ready"
        elif not any(self._serves(view) for view in self._replicas()):
            reasons["replicas"] = "every replica that is said to be ready fails"
        if self.relay.draining:
            reasons["gateway"] = "it is shutting down"
        return reasons

    @property
    def dispatch(self) -> Dispatch:
        """Where limits are judged and requests placed."""
        return self._dispatch

    def refresh_metrics(self) -> None:
        """Set the gauges."""
        metrics = self.metrics
        metrics.open_requests.set(len(self.relay))
        metrics.settling.set(len(self._endings))
        metrics.spool_bytes.set(self._books.spool_bytes)
        metrics.ledger_away.set(self._books.away)
        metrics.ledger_refused.set(self._books.refused_words)
        metrics.dispatch_degraded.set(self._dispatch.degraded)
        metrics.view_age_s.set(self._clock() - self.routes.read_s)
        metrics.worker_connections.set(self._workers.connections)
        metrics.replicas_shunned.set(self._health.open_count)
        for pool, classes in self._dispatch.waiting().items():
            for service_class, count in classes.items():
                metrics.queue_length.labels(pool, service_class).set(count)
            wait_s = self._dispatch.congestion_ms(pool) / 1000
            metrics.expected_wait_s.labels(pool).set(wait_s)

    def new_request_id(self) -> str:
        """A fresh one."""
        return ids.request_id(self.settings.region, os.urandom(ids.REQUEST_ENTROPY_BYTES), now_ms())

    # Opening.

    async def _open_postgres(self) -> None:
        """Two pools: however often kept responses are read, look-ups have their own."""
        settings = self.settings
        self._postgres = await Postgres.open(
            PostgresConfig(
                database_url=settings.database_url,
                application_name=f"headworks {self.id}",
                connections_max=POSTGRES_CONNECTIONS,
                transaction_timeout_s=POSTGRES_BLOCK_S,
            )
        )
        self._responses_postgres = await Postgres.open(
            PostgresConfig(
                database_url=settings.database_url,
                application_name=f"headworks responses {self.id}",
                connections_max=RESPONSES_CONNECTIONS,
                transaction_timeout_s=POSTGRES_BLOCK_S,
            )
        )

    async def _first_contact(self) -> None:
        until_s = self._clock() + self.settings.start_timeout_ms / 1000
        while True:
            try:
                await self._assert_lease()
                await self._read_routes()
                await self.auth.poll()  # before any key is read: its revocation must be seen
            except (StoreAwayError, SourceAwayError):
                if self._clock() > until_s:
                    raise
                await asyncio.sleep(0.25)
            else:
                return

    def _shared(self) -> Shared:
        settings = self.settings
        parts = Parts(
            shortage=Shortage(self._dispatch, now_ms),
            dispatch=self._dispatch,
            workers=self._workers,
            routes=self.routes,
            metrics=self.metrics,
            limits=GenerationLimits(
                deaths_max=settings.deaths_max,
                nacked_s=settings.nacked_ms / 1000,
                unsent_s=settings.unsent_ms / 1000,
                abort_s=settings.worker_abort_ms / 1000,
            ),
            health=self._health,
            failures=self._failures,
            fingerprint_key=_fingerprint_key(settings),
            beside=self._beside,
        )
        return Shared(
            gateway_id=self.id,
            region=settings.region,
            routes=self.routes,
            prompts=self.prompts,
            grammars=self._grammars,
            books=self._books,
            prefixes=PrefixMemory(),
            metrics=self.metrics,
            bindings=self._bindings,
            endings=self._endings,
            guards=Guards(self._records, now_ms),
            answers=self._answers,
            generation=parts,
            limits=RelayLimits(
                exchanges_max=settings.exchanges_max,
                slow_reader_s=settings.slow_reader_ms / 1000,
                checkpoint_age_s=settings.checkpoint_ms / 1000,
                drain_s=settings.drain_ms / 1000,
                settle_s=settings.settle_ms / 1000,
            ),
            hold_limits=HoldLimits(first_output_tokens=settings.reserve_output_tokens),
            now_ms=now_ms,
            outside=ProviderTargets(
                ProviderParts(
                    providers=self._providers,
                    metrics=self.metrics,
                    now_ms=now_ms,
                    fleet=self._dispatch,
                    endings=self._endings,
                ),
                self.routes,
            ),
            new_request_id=self.new_request_id,
            new_seed=lambda: int.from_bytes(os.urandom(8), "big") >> 1,
            renew_routes=self._poll_routes,
        )

    def _start_loops(self) -> None:
        settings = self.settings
        poll_s = settings.poll_ms / 1000
        lease_s = settings.lease_ms / 1000 / LEASE_PARTS
        start = self._background.every
        start(poll_s, "routes", self._poll_routes, within_s=5.0)
        start(poll_s, "keys", self._poll_keys, within_s=5.0)
        start(poll_s, "answer cache", self._answers.poll, within_s=5.0)
        start(lease_s, "lease", self._assert_lease, within_s=5.0)
        start(1.0, "spool", self._books.recover, within_s=600.0)
        start(60.0, "adoption", self._books.adopt, within_s=600.0)
        start(1.0, "safety records", self._records.flush, within_s=10.0)
        start(1.0, "slow readers", self._cut_slow_readers, within_s=1.0)
        start(poll_s, "failures", self._failures.poll, within_s=5.0)
        start(10.0, "idle connections", self._sweep_connections, within_s=1.0)
        start(settings.checkpoint_ms / 1000, "checkpoint", self._checkpoint, within_s=10.0)

    # The loops' work.

    async def _poll_routes(self) -> None:
        await self._read_routes()
        self._announce()

    async def _read_routes(self) -> None:
        began_s = self._clock()
        self.routes.update(await self._source.routing_view(), began_s)

    def _announce(self) -> None:
        for pool, replicas in self.routes.announcement().items():
            self._dispatch.set_replicas(pool, replicas)
        self._health.keep(view.boot_id for view in self._replicas())
        self._providers.forget(provider.name for provider in self.routes.view.providers)
        for version in self.routes.versions:
            self.prompts.want(version)

    async def _poll_keys(self) -> None:
        await self.auth.poll()

    async def _assert_lease(self) -> None:
        adopted = set(self._spool.adopted)
        async with self._postgres.transaction() as conn:
            await assert_lease(
                conn,
                self.id,
                self.settings.region,
                self.settings.lease_ms,
                spool_bytes=self._books.spool_bytes,
                refused_words=self._books.refused_words,
            )
            if adopted:
                await spools_adopted(conn, adopted)
        self._spool.adopted -= adopted

    async def _retire_lease(self) -> None:
        try:
            async with self._postgres.transaction() as conn:
                await retire_lease(conn, self.id, spool_bytes=self._spool.size_bytes)
        except StoreAwayError:
            _log.warning("the lease could not be retired; the sweeper will see it run out")

    async def _last_words(self) -> None:
        """What the spool holds, if the ledger takes it in time; else the next life adopts it."""
        try:
            async with asyncio.timeout(self.settings.settle_ms / 1000):
                await self._books.recover()
        except TimeoutError:
            _log.warning("the spool is left for another incarnation to replay")

    def _replicas(self) -> Iterator[ReplicaView]:
        return chain.from_iterable(self.routes.view.replicas.values())

    def _serves(self, view: ReplicaView) -> bool:
        return view.ready and not self._health.is_failing(view.boot_id)

    async def _sweep_connections(self) -> None:
        self._workers.sweep()

    async def _cut_slow_readers(self) -> None:
        self.relay.cut_slow_readers()

    async def _checkpoint(self) -> None:
        await self.relay.checkpoint()


def _failure_rules(settings: GatewaySettings) -> FailureRules:
    return FailureRules(
        retries=RetryRules(permille=settings.retry_permille, floor=settings.retry_floor),
        deaths=DeathRules(refuse_ms=settings.death_refused_ms),
    )


def _answers_key(settings: GatewaySettings) -> bytes:
    """The same at every gateway: what one keeps, another finds."""
    return hmac.digest(settings.internal_secret.encode(), b"names of answers", "sha256")


def _fingerprint_key(settings: GatewaySettings) -> bytes:
    """The same for all gateways, and for nothing else."""
    return hmac.digest(settings.internal_secret.encode(), b"fingerprints", "sha256")


def _dispatch_rules(settings: GatewaySettings) -> DispatchRules:
    shares = QueueRules(share_standard=settings.share_standard, share_batch=settings.share_batch)
    return DispatchRules(call_timeout_ms=settings.valkey_call_ms, pool=PoolRules(queue=shares))


def _worker_limits(settings: GatewaySettings) -> WorkerLimits:
    return WorkerLimits(
        connect_s=settings.worker_connect_ms / 1000,
        head_s=settings.worker_head_ms / 1000,
        first_frame_s=settings.worker_first_frame_ms / 1000,
        idle_s=settings.worker_idle_ms / 1000,
        abort_s=settings.worker_abort_ms / 1000,
    )
