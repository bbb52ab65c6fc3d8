"""One run: a cast, a crowd and its faults, driven event by event and judged after each.

Invariant: a run is a function of its `WorldConfig`.
"""

from core.accounts import EntryKind
from simulator.cast import Cast
from simulator.clock import START_MS, Clock
from simulator.config import CONTEXT_TOKENS, Seeded, WorldConfig
from simulator.faults import Fault, Injector
from simulator.history import History
from simulator.invariants import InvariantError
from simulator.orders import Orders
from simulator.report import Report, SimulationError, ends_of, refusals_of
from simulator.rest_rules import RestFacts
from simulator.strikes import JUMP_MS, Strikes
from simulator.tenant import Crowd

STORM_MS = 6_000  # faults strike so long
QUIET_MS = 13_000  # a lease, a grace, and some
CLOCK_QUIET_MS = QUIET_MS + JUMP_MS  # a clock that jumped back first stands still
REST_LATEST_MS = 120_000  # after the calm; longer is never
RUNAWAY_EVENTS = 50_000
RUNAWAY_EVENTS_PER_ORDER = 500
TAIL_EVENTS = 60


class World:
    """Build it, `run` it once."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.clock = Clock()
        self.orders = Orders()
        seeded = Seeded(config.seed)
        self.cast = Cast(config, self.clock, seeded, self.orders)
        self._crowd = Crowd(
            self.clock,
            seeded.stream("crowd"),
            self.cast,
            orders=config.orders,
            context_tokens=CONTEXT_TOKENS,
        )
        for profile in self._crowd.profiles:
            self.cast.bank.book.open_account(profile.tenant, profile.hard_cap_micro)
        self._calm_ms = START_MS + (STORM_MS if config.faults else 0)
        self._injector = Injector(
            self.clock,
            self.cast.network,
            Strikes(self.cast),
            dice=seeded.stream("faults"),
            faults=config.faults,
            calm_ms=self._calm_ms,
        )
        self._history = History(TAIL_EVENTS)
        self._events = 0
        self._over_since_ms: int | None = None

    def run(self) -> Report:
        """To rest, or to `events_max`. Raises SimulationError."""
        try:
            while not self._is_at_rest():
                self._step()
                if self._events == self.config.events_max:
                    return self._report()
            self.cast.invariants.at_rest(self._facts())
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self.cast.stop()
        return self._report()

    def _step(self) -> None:
        label = self.clock.step()
        assert label is not None, "processes always have something planned"
        self._events += 1
        self._history.note(self.clock.now_ms, label)
        self.cast.invariants.after_event()

    def _is_at_rest(self) -> bool:
        now_ms = self.clock.now_ms
        if self._events > RUNAWAY_EVENTS + RUNAWAY_EVENTS_PER_ORDER * self.config.orders:
            raise InvariantError("there is no end to the events")
        if self._crowd.left or self.orders.open or not self._injector.is_calm:
            if now_ms > self._calm_ms + REST_LATEST_MS:
                raise InvariantError(f"starve: {', '.join(self.orders.open)}")
            return False
        if self._over_since_ms is None:
            self._over_since_ms = now_ms
        quiet_ms = now_ms - self._over_since_ms
        if quiet_ms < (CLOCK_QUIET_MS if Fault.CLOCK in self.config.faults else QUIET_MS):
            return False
        unsaid = self.cast.unsaid()
        if unsaid and quiet_ms > REST_LATEST_MS:
            raise InvariantError(f"never said: {unsaid}")
        return not unsaid

    def _facts(self) -> RestFacts:
        cast = self.cast
        return RestFacts(
            book=cast.bank.book,
            dead_gateways=cast.dead_gateways,
            all_went_well=not self.config.faults,
        )

    def _failure(self, error: Exception) -> SimulationError:
        config = self.config
        is_rule = isinstance(error, InvariantError)
        replay = (
            f"python -m simulator --seed {config.seed} --orders {config.orders} "
            f"--gateways {config.gateways} --workers {config.workers}"
        )
        if config.faults:
            replay += f" --faults {','.join(config.faults)}"
        return SimulationError(
            str(error) if is_rule else f"{type(error).__name__}: {error}",
            seed=config.seed,
            replay=replay,
            events=self._events,
            tail=self._history.tail(START_MS),
        )

    def _report(self) -> Report:
        book = self.cast.bank.book
        orders = self.orders.all.values()
        workers = self.cast.workers.values()
        attempts = [attempt for order in orders for attempt in order.attempts.values()]
        preemptions = sum(worker.engine.scheduler.num_preemptions for worker in workers)
        overage = (e for e in book.entries if e.kind is EntryKind.OVERAGE)
        return Report(
            seed=self.config.seed,
            faults=tuple(map(str, self.config.faults)),
            strikes=self._injector.strikes,
            requests=len(orders),
            ends=ends_of(self.orders),
            refusals=refusals_of(self.orders),
            attempts=len(attempts),
            resumes=sum(any(attempt.resumed.values()) for attempt in attempts),
            produced_tokens=sum(order.produced for order in orders),
            delivered_tokens=sum(order.delivered for order in orders),
            metered_tokens=sum(row.metered.output_tokens for row in book.rows.values()),
            overage_micro=sum(entry.posted_delta_micro for entry in overage),
            preemptions=self.cast.preemptions_before + preemptions,
            events=self._events,
            history=self._history.digest,
            virtual_s=(self.clock.now_ms - START_MS) / 1000,
        )
