"""Whatever a pool is told, its accounts add up, its replicas are not overfilled, all ends."""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from core.dispatch import Pool, PoolRules
from core.fair_queue import CLASSES
from core.placement import candidates, free_blocks
from core.protocol import Load
from core.tickets import Arm, Dropped, Placed, Queued, Renew, Renewed, ReplicaView

RULES = PoolRules(sweep_max=2)
GATEWAYS = ("gw1", "gw2")
VIEWS = tuple(
    ReplicaView(
        replica=name,
        boot_id=f"boot_{name}",
        url="u",
        version="v",
        ready=True,
        kv_blocks=blocks,
        sequences=3,
    )
    for name, blocks in (("r1", 12), ("r2", 8))
)


class PoolMachine(RuleBasedStateMachine):
    """Two gateways that keep the protocol, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(RULES)
        self.now_ms = 1_700_000_000_000
        self.arms: dict[str, Arm] = {}
        self.outcomes: dict[str, Placed] = {}
        self.armed = 0
        self.reports = 0
        self.leases: dict[str, int] = {}  # until when the pool keeps what each gateway has
        self.owing: set[str] = set()  # gateways whose tickets the pool may have let go
        self.has_lapsed = False  # any, since the pool was opened

    @initialize()
    def open_the_pool(self) -> None:
        for gateway in GATEWAYS:
            self.renew(gateway, acknowledges=False)
        self.now_ms += RULES.reannounce_ms

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        tenant=st.sampled_from(["a", "b", "c"]),
        service_class=st.sampled_from(CLASSES),
        blocks=st.integers(1, 12),
        patience=st.sampled_from([0, 300, 5_000]),
    )
    def arm(self, gateway: str, tenant: str, service_class: str, blocks: int, patience: int):
        self.armed += 1
        self.is_heard(gateway)
        arm = Arm(
            ticket=f"t{self.armed}",
            gateway=gateway,
            pool="p",
            tenant=tenant,
            weight=1 + (tenant == "c"),
            service_class=service_class,
            deadline_ms=patience and self.now_ms + patience,
            kv_blocks=blocks,
            prompt_tokens=blocks * 16,
        )
        self.take(arm, self.pool.arm(arm, self.now_ms))

    @rule(again=st.booleans(), data=st.data())
    @precondition(lambda self: self.arms)
    def arm_again_or_be_declined(self, *, again: bool, data):
        arm = self.arms[data.draw(st.sampled_from(sorted(self.arms)))]
        placed = self.outcomes.get(arm.ticket)
        if placed is not None and not again:
            arm = Arm(**{f: getattr(arm, f) for f in arm.__struct_fields__} | {
                "exclude": (placed.replica,), "at_head": True,
            })  # fmt: skip
            del self.outcomes[arm.ticket]
        is_known = arm.ticket in self.pool.tickets and not self.is_over(arm.gateway)
        self.is_heard(arm.gateway)
        answer = self.pool.arm(arm, self.now_ms)
        # One that was given a replica it excludes, for want of others, now comes back from it.
        if placed is not None and again and is_known and placed.replica not in arm.exclude:
            assert answer == placed
        self.outcomes.pop(arm.ticket, None)
        self.take(arm, answer)

    def is_over(self, gateway: str) -> bool:
        return self.leases.get(gateway, 0) <= self.now_ms

    def is_heard(self, gateway: str) -> None:
        if self.is_over(gateway):
            self.owing.add(gateway)
            self.has_lapsed |= gateway in self.leases
        self.leases[gateway] = self.now_ms + RULES.lease_ms

    def take(self, arm: Arm, answer: Placed | Queued | Dropped) -> None:
        self.arms[arm.ticket] = arm
        if isinstance(answer, Placed):
            self.outcomes[arm.ticket] = answer
        if isinstance(answer, Dropped):
            self.forget(arm.ticket)

    def forget(self, ticket: str) -> None:
        self.arms.pop(ticket, None)
        self.outcomes.pop(ticket, None)

    @rule(gateway=st.sampled_from(GATEWAYS), acknowledges=st.booleans())
    def renew(self, gateway: str, *, acknowledges: bool) -> None:
        acks = tuple(g.ticket for g in self.pool.grants_for(gateway)) if acknowledges else ()
        self.is_heard(gateway)
        renewed = self.pool.renew(
            Renew(gateway=gateway, pool="p", epoch=self.pool.epoch, replicas=VIEWS, acks=acks),
            self.now_ms,
        )
        self.hear(renewed)
        if renewed.reannounce:
            assert gateway in self.owing
            self.announce(gateway)
        mine = {name for name, arm in self.arms.items() if arm.gateway == gateway}
        assert mine <= self.pool.tickets.keys(), "it was not told that these were let go"
        self.check_no_head_was_left_that_fits()

    def announce(self, gateway: str, *loads: tuple[str, Load]) -> None:
        self.is_heard(gateway)
        renewed = self.pool.renew(
            Renew(
                gateway=gateway,
                pool="p",
                epoch=self.pool.epoch,
                replicas=VIEWS,
                loads=loads,
                announces=True,
                held=self.held(gateway),
            ),
            self.now_ms,
        )
        self.owing.discard(gateway)
        assert not renewed.reannounce
        self.hear(renewed)

    def hear(self, renewed: Renewed) -> None:
        for grant in renewed.confirmed:
            if isinstance(grant.outcome, Placed):
                self.outcomes[grant.ticket] = grant.outcome
            else:
                self.forget(grant.ticket)

    def held(self, gateway: str):
        return tuple(
            (arm, self.outcomes.get(name))
            for name, arm in self.arms.items()
            if arm.gateway == gateway
        )

    @rule(replica=st.sampled_from(VIEWS), free=st.integers(0, 12), lag=st.booleans())
    def report(self, replica: ReplicaView, free: int, *, lag: bool) -> None:
        self.reports += 1
        known = self.pool.replicas.get(replica.replica)
        load = Load(
            boot_id=replica.boot_id,
            seq=self.reports,
            kv_blocks_total=replica.kv_blocks,
            kv_blocks_free=free,
            running=0,
            waiting=0,
            placed_seq=known.placed - lag if known is not None else 0,
        )
        self.announce("gw1", (replica.replica, load))

    @rule(duration_ms=st.sampled_from([1, 100, 260, 1_000, RULES.lease_ms]))
    def time_passes(self, duration_ms: int) -> None:
        self.now_ms += duration_ms

    @rule(data=st.data(), finishes=st.booleans())
    @precondition(lambda self: self.arms)
    def end(self, data, *, finishes: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.arms)))
        self.end_one(ticket, finishes=finishes)

    def end_one(self, ticket: str, *, finishes: bool) -> None:
        if finishes:
            self.pool.finish(
                ticket, input_tokens=5, output_tokens=9, prefix_hashes=(), now_ms=self.now_ms
            )
        else:
            self.pool.cancel(ticket, self.now_ms)
        self.forget(ticket)

    def check_no_head_was_left_that_fits(self) -> None:
        """Work conservation: the first head waits only because no replica has room for it."""
        head = self.pool.queue.head(())
        if head is None:
            return
        ticket = self.pool.tickets[head.ticket]
        for replica in candidates(
            self.pool.replicas.values(), ticket.kv_blocks, ticket.exclude, self.now_ms,
            RULES.placement,
        ):  # fmt: skip
            full = replica.open >= replica.sequences
            assert full or free_blocks(replica) < ticket.kv_blocks

    @invariant()
    def accounts_are_the_sums_of_their_tickets(self) -> None:
        for replica in self.pool.replicas.values():
            held = [t for t in self.pool.tickets.values() if t.number == replica.number]
            assert replica.open == len(held)
            assert replica.open_blocks == sum(t.kv_blocks for t in held)
            # What was let go with a lease is not there to be counted, and comes back as it is.
            if not self.has_lapsed:
                assert replica.open <= replica.sequences
                assert replica.open_blocks <= replica.total
            assert replica.unreported_blocks == sum(u.blocks for u in replica.unreported.values())

    @invariant()
    def every_ticket_is_in_one_place(self) -> None:
        queued = {t for line in self.pool.queue.tickets.values() for t in line}
        told = {t for names in self.pool.book.granted.values() for t in names}
        for name, ticket in self.pool.tickets.items():
            assert (name in queued) == (ticket.state == "queued")
            assert (name in told) == (ticket.state in {"granted", "dropped"})
            assert (name in self.pool.book.unacked) == (ticket.state == "granted")
        assert len(queued) == len(self.pool.queue)

    def teardown(self) -> None:
        for ticket in list(self.pool.tickets):
            self.end_one(ticket, finishes=True)
        for replica in self.pool.replicas.values():
            account = (replica.open, replica.open_blocks, replica.unreported_blocks)
            assert account == (0, 0, 0)
        for left in (self.pool.tickets, self.pool.book.owned, self.pool.book.granted):
            assert not left
        assert len(self.pool.queue) == len(self.pool.book.unacked) == 0


TestPool = PoolMachine.TestCase
