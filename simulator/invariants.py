"""What must hold: judged as it happens, after every event, and once all is at rest.

    as it happens   every token is the sequential model's; no step after a deadline
    every event     of what the event touched: KV blocks, the dispatcher's accounts, balances,
                    tenants' concurrency
    at rest         every request ended once and in time, metered = produced, all accounts zero

Each check compares a decision module's books with the orders, which are the truth, or with
another module's books; none asks a module whether it is right.
"""

from collections.abc import Callable, Iterable

from core.protocol import Generate
from simulator.bank import Bank
from simulator.bank_rules import BankRules
from simulator.clock import Clock
from simulator.dispatcher import Dispatcher
from simulator.journal import Key
from simulator.orders import Attempt, Orders
from simulator.pool_rules import idle_problems, pool_problems, room_problems
from simulator.rest_rules import RestFacts, order_problems
from simulator.service_rules import InFlight, ServiceRules
from simulator.worker import Worker


class InvariantError(Exception):
    """Something that must hold does not."""


class Invariants:
    """Implements `EngineWatch`."""

    def __init__(
        self,
        clock: Clock,
        orders: Orders,
        bank: Bank,
        dispatcher: Dispatcher,
        *,
        workers: Callable[[], Iterable[Worker]],
        in_flight: Callable[[], Iterable[InFlight]],
        all_goes_well: bool,
    ) -> None:
        self._clock = clock
        self._orders = orders
        self._bank = bank
        self._bank_rules = BankRules(bank.book)
        self._dispatcher = dispatcher
        self._workers = workers
        self._all_goes_well = all_goes_well
        self._service_rules = ServiceRules(clock, orders, dispatcher, in_flight)
        dispatcher.watch = self._service_rules

    # As it happens: the engine.

    def accepted(self, request: Generate, replica: str) -> None:
        """A worker took an attempt: what it resumes from must be the answer so far."""
        order = self._orders.all[request.request_id]
        _require(request.attempt not in order.attempts, f"{request.request_id}: attempt reused")
        resumed = {choice.index: len(choice.output_ids) for choice in request.choices}
        order.attempts[request.attempt] = Attempt(replica, resumed, dict.fromkeys(resumed, 0))
        for choice in request.choices:
            expected = order.expected[choice.index][: len(choice.output_ids)]
            _require(
                list(choice.output_ids) == expected,
                f"{request.request_id} resumes choice {choice.index} from other tokens",
            )

    def started(self, key: Key, cached_tokens: int) -> None:
        """What is found in cache is what the tenant itself has sent before."""
        order = self._orders.all[key[0]]
        own = (
            other.prompt[:cached_tokens] == order.prompt[:cached_tokens]
            for other in self._orders.all.values()
            if other.profile.tenant == order.profile.tenant and other.attempts
        )
        is_first = len(order.attempts) == 1
        others = sum(own) - is_first
        _require(
            cached_tokens == 0 or others > 0,
            f"{key[0]} finds {cached_tokens} tokens in cache that its tenant never sent",
        )

    def planned(self, key: Key, deadline_ms: int) -> None:
        """Nothing is served after its deadline."""
        _require(self._clock.now_ms < deadline_ms, f"{key[0]} is served after its deadline")

    def produced(self, key: Key, choice: int, token: int) -> None:
        """The same token as with no blocks, no steps and no neighbours."""
        order = self._orders.all[key[0]]
        attempt = order.attempts[key[1]]
        index = attempt.resumed[choice] + attempt.produced[choice]
        attempt.produced[choice] += 1
        expected = order.expected[choice]
        _require(index < len(expected), f"{key[0]} choice {choice} goes on after its end")
        _require(
            token == expected[index],
            f"{key[0]} choice {choice}: token {index} is {token}, alone it is {expected[index]}",
        )

    # After every event.

    def after_event(self) -> None:
        """Judge what was touched."""
        for worker in self._workers():
            if worker.alive and worker.engine.touched:
                worker.engine.touched = False
                _require_none(worker.name, worker.engine.scheduler.problems())
        if self._dispatcher.touched:
            self._dispatcher.touched = False
            _require_none("limits", self._service_rules.problems())
            _require_none("dispatcher", pool_problems(self._dispatcher.pool))
            if self._all_goes_well:
                _require_none("dispatcher", room_problems(self._dispatcher.pool))
        if self._bank.touched:
            self._bank.touched = False
            _require_none("bank", self._bank_rules.problems())

    # At rest.

    def at_rest(self, facts: RestFacts) -> None:
        """Judge everything."""
        for order in self._orders.all.values():
            _require_none(order.request_id, order_problems(order, facts))
        _require_none("bank", self._bank_rules.problems())
        _require_none("bank", self._bank_rules.rest_problems())
        _require(self._bank.refused_words == 0, "the bank refused a settlement")
        self._dispatcher.let_lapse()
        _require_none("dispatcher", idle_problems(self._dispatcher.pool))
        for tenant in sorted(self._dispatcher.buckets):
            _require(self._dispatcher.held(tenant) == 0, f"{tenant} still holds tickets")
        for worker in self._workers():
            _require_none(worker.name, _engine_problems(worker))


def _engine_problems(worker: Worker) -> list[str]:
    scheduler = worker.engine.scheduler
    pool = scheduler.pool
    found = scheduler.problems()
    if not worker.engine.is_idle or scheduler.has_work:
        found.append("has work left")
    if pool.num_in_use or pool.num_available != pool.num_blocks:
        found.append(f"{pool.num_in_use} blocks are in use at idle")
    if pool.host.num_available != pool.host.num_blocks:
        found.append("host blocks are held at idle")
    return found


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001 -- reads as an assertion
    if not holds:
        raise InvariantError(problem)


def _require_none(who: str, problems: list[str]) -> None:
    _require(not problems, f"{who}: {'; '.join(problems)}")
