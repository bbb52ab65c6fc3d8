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
from core.tickets import Arm, Dropped, Placed, Queued, Renew, ReplicaView

RULES = PoolRules()
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
        answer = self.pool.arm(arm, self.now_ms)
        if placed is not None and again:
            assert answer == placed
        self.take(arm, answer)

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
        renewed = self.pool.renew(
            Renew(
                gateway=gateway,
                pool="p",
                epoch=self.pool.epoch,
                replicas=VIEWS,
                acks=acks,
                announces=not self.pool.epoch or gateway not in self.pool.gateways,
                held=self.held(gateway) if gateway not in self.pool.gateways else (),
            ),
            self.now_ms,
        )
        assert not renewed.reannounce
        for grant in renewed.confirmed:
            if isinstance(grant.outcome, Placed):
                self.outcomes[grant.ticket] = grant.outcome
            else:
                self.forget(grant.ticket)
        self.check_no_head_was_left_that_fits()

    def held(self, gateway: str):
        return tuple(
            (arm, self.outcomes.get(name))
            for name, arm in self.arms.items()
            if arm.gateway == gateway
        )

    @rule(replica=st.sampled_from(VIEWS), free=st.integers(0, 12), lag=st.booleans())
    def report(self, replica: ReplicaView, free: int, *, lag: bool) -> None:
        self.reports += 1
        known = self.pool.replicas[replica.replica]
        load = Load(
            boot_id=replica.boot_id,
            seq=self.reports,
            kv_blocks_total=replica.kv_blocks,
            kv_blocks_free=free,
            running=0,
            waiting=0,
            placed_seq=known.placed - lag,
        )
        renew = Renew(
            gateway="gw1",
            pool="p",
            epoch=self.pool.epoch,
            replicas=VIEWS,
            loads=((replica.replica, load),),
            announces=True,
            held=self.held("gw1"),
        )
        self.pool.renew(renew, self.now_ms)

    @rule(duration_ms=st.sampled_from([1, 100, 260, 1_000]))
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
            assert replica.open == len(held) <= replica.sequences
            assert replica.open_blocks == sum(t.kv_blocks for t in held) <= replica.total
            assert replica.unreported_blocks == sum(u.blocks for u in replica.unreported.values())

    @invariant()
    def every_ticket_is_in_one_place(self) -> None:
        queued = {t for line in self.pool.queue.tickets.values() for t in line}
        told = {t for names in self.pool.granted.values() for t in names}
        for name, ticket in self.pool.tickets.items():
            assert (name in queued) == (ticket.state == "queued")
            assert (name in told) == (ticket.state in {"granted", "dropped"})
            assert (name in self.pool.unacked) == (ticket.state == "granted")
        assert len(queued) == len(self.pool.queue)

    def teardown(self) -> None:
        for ticket in list(self.pool.tickets):
            self.end_one(ticket, finishes=True)
        for replica in self.pool.replicas.values():
            account = (replica.open, replica.open_blocks, replica.unreported_blocks)
            assert account == (0, 0, 0)
        for left in (self.pool.tickets, self.pool.owned, self.pool.granted):
            assert not left
        assert len(self.pool.queue) == len(self.pool.unacked) == 0


TestPool = PoolMachine.TestCase
