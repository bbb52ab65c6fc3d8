"""Tenants' requests in service: which of them count, and how long one may be untold."""

import msgspec
import pytest

import simulator.dispatcher
from core.limits import admit
from core.tickets import Admit, Admitted, CacheVersions, LimitRefused, Limits, Output
from simulator.clock import Clock
from simulator.config import WorldConfig
from simulator.dispatch_link import DispatchLink
from simulator.dispatcher import Dispatcher
from simulator.faults import ALL_FAULTS, Fault
from simulator.orders import Orders
from simulator.report import SimulationError
from simulator.service_rules import TELL_MS, InFlight, ServiceRules
from simulator.world import World
from tests.support.simulated_orders import served

TOO_MANY = "ten has 2 requests in service, 1 are allowed"
LEASE_MS = 5_000


def asking(ticket):
    return Admit(
        ticket=ticket,
        gateway="gw",
        tenant="ten",
        key="key",
        model="m",
        versions=CacheVersions(key=1, tenant=1, route=1),
        limits=Limits(concurrency=1),
        input_tokens=1,
    )


def an_open_order(ticket):
    order, _ = served()
    order.request_id, order.cause = ticket, None
    return order


class Scene:
    """A shared dispatcher that is judged, and tickets `a`, `b` and `c` of one tenant."""

    def __init__(self):
        self.clock = Clock()
        self.dispatcher = Dispatcher(self.clock, simulator.dispatcher.Pool)
        self.orders = Orders()
        self.in_flight = []
        for ticket in "abc":
            self.orders.add(an_open_order(ticket))
        self.rules = ServiceRules(self.clock, self.orders, self.dispatcher, lambda: self.in_flight)
        self.dispatcher.watch = self.rules

    def force(self, ticket):
        """Have it admitted whatever is held."""
        self.rules.admitted(asking(ticket))

    def touch(self, ticket):
        self.dispatcher.charge({"ten": (Output(ticket, 0),)})


@pytest.fixture
def scene():
    return Scene()


def test_one_too_many_is_said_once(scene):
    scene.force("a")
    assert scene.rules.problems() == []
    scene.force("b")
    assert scene.rules.problems() == [TOO_MANY]
    assert scene.rules.problems() == []


def test_a_request_that_is_over_does_not_count(scene):
    scene.force("a")
    scene.orders.end(scene.orders.all["a"], "complete", "", scene.clock.now_ms)
    scene.force("b")
    assert scene.rules.problems() == []


def test_a_request_untold_for_a_lease_does_not_count(scene):
    scene.force("a")
    scene.clock.now_ms += LEASE_MS - 1
    scene.force("b")
    assert scene.rules.problems() == [TOO_MANY]
    scene.clock.now_ms += 1
    scene.force("c")
    assert scene.rules.problems() == [TOO_MANY]


@pytest.mark.parametrize("forget", ["wipe", "restore", "jump"])
def test_a_request_that_was_forgotten_counts_once_it_is_told_again(scene, forget):
    scene.force("a")
    arguments = {"wipe": (), "restore": (scene.dispatcher.copy(),), "jump": (LEASE_MS,)}
    getattr(scene.dispatcher, forget)(*arguments[forget])
    scene.force("b")
    assert scene.rules.problems() == []
    scene.touch("a")
    scene.force("c")
    assert scene.rules.problems() == ["ten has 3 requests in service, 1 are allowed"]


def test_an_admission_said_twice_is_one(scene):
    scene.dispatcher.admit(asking("a"))
    scene.touch("b")
    scene.dispatcher.admit(asking("a"))
    assert scene.rules.problems() == []
    assert isinstance(scene.dispatcher.admit(asking("c")), LimitRefused)
    assert scene.rules.problems() == []


def test_an_admission_that_comes_when_its_request_is_over_admits_nothing_new(scene):
    # Its gateway went alone, announced it when it was back, and ended it: all before this word.
    for ticket in "abc":
        scene.touch(ticket)
    scene.orders.end(scene.orders.all["a"], "complete", "", scene.clock.now_ms)
    assert isinstance(scene.dispatcher.admit(asking("a")), Admitted)
    assert scene.rules.problems() == []


def test_an_admission_said_again_after_a_clock_jumped_admits_nothing_new(scene):
    for ticket in "ab":
        scene.touch(ticket)
    scene.dispatcher.jump(-LEASE_MS)
    scene.touch("a")
    assert isinstance(scene.dispatcher.admit(asking("b")), Admitted)
    assert scene.rules.problems() == []


def test_one_too_many_is_said_though_its_request_is_over(scene):
    scene.force("a")
    scene.orders.end(scene.orders.all["b"], "complete", "", scene.clock.now_ms)
    scene.force("b")
    assert scene.rules.problems() == [TOO_MANY]


def test_a_request_may_be_untold_for_a_while_and_no_longer(scene):
    scene.in_flight = [InFlight("a", scene.clock.now_ms)]
    scene.clock.now_ms += TELL_MS
    assert scene.rules.problems() == []
    scene.clock.now_ms += 1
    assert scene.rules.problems() == [f"a is in service, and untold for {TELL_MS + 1} ms"]


@pytest.mark.parametrize("forget", ["wipe", "nothing"])
def test_its_while_begins_when_memory_is_lost(scene, forget):
    scene.in_flight = [InFlight("a", scene.clock.now_ms)]
    scene.force("a")
    scene.clock.now_ms += LEASE_MS
    if forget == "wipe":
        scene.dispatcher.wipe()
    untold = forget == "nothing"
    assert scene.rules.problems() == [f"a is in service, and untold for {LEASE_MS} ms"] * untold


# In a world.


def test_memory_is_lost_before_an_admission_is_answered():
    # Who judges by the answer takes the first for one of those that the new memory admitted.
    world = World(WorldConfig(seed=1))
    gateway, valkey = world.cast.gateways["gateway 0"], world.cast.valkey
    tickets = ("a", "b")
    for ticket in tickets:
        world.orders.add(an_open_order(ticket))
    first = gateway.spawn(gateway.link.admit(asking("a")))
    while "admit a" not in (world.clock.step() or ""):
        world.cast.invariants.after_event()
    assert not first.result.done
    valkey.dispatcher.wipe()
    second = gateway.spawn(gateway.link.admit(asking("b")))
    while not second.result.done:
        world.clock.step()
        world.cast.invariants.after_event()
    assert all(isinstance(task.result.value, Admitted) for task in (first, second))
    # Its gateway tells of it soon, and then it counts.
    until_ms = world.clock.now_ms + TELL_MS
    while world.clock.now_ms < until_ms:
        world.clock.step()
        world.cast.invariants.after_event()
    assert set(valkey.dispatcher.buckets["ten"].held) == set(tickets)
    world.cast.stop()


CLOCK_AND_DELAY = (Fault.PARTITION, Fault.CLOCK, Fault.DELAY, Fault.REPEAT)


# Lost memory before an admission was answered; had one arrive when its request was over; had
# one arrive when its ticket was announced already, and a clock had jumped in between.
@pytest.mark.parametrize(
    ("seed", "faults"), [(60_028, ALL_FAULTS), (60_250, ALL_FAULTS), (73_020, CLOCK_AND_DELAY)]
)
def test_seeds_that_failed_once(seed, faults):
    World(WorldConfig(seed=seed, faults=faults, orders=60)).run()


def says(words, seeds, *faults):
    for seed in seeds:
        try:
            World(WorldConfig(seed=seed, faults=faults, orders=60)).run()
        except SimulationError as error:
            if words in str(error):
                return True
    return False


def test_a_dispatcher_that_ignores_concurrency_is_found(monkeypatch):
    def ignores(state, asked, now_ms, rules):
        limits = msgspec.structs.replace(asked.limits, concurrency=0)
        return admit(state, msgspec.structs.replace(asked, limits=limits), now_ms, rules)

    monkeypatch.setattr(simulator.dispatcher, "admit", ignores)
    assert says("requests in service, 3 are allowed", range(5))


def test_a_gateway_that_tells_nothing_again_is_found(monkeypatch):
    async def tells_only_output(self):
        while True:
            await simulator.dispatch_link.sleep(self._clock, 100, "charge")
            await self._charge(list(self._produced))

    monkeypatch.setattr(DispatchLink, "_keep_charging", tells_only_output)
    assert says("is in service, and untold for", range(3), Fault.WIPE, Fault.WORKER)
