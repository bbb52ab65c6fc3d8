"""Whatever is said to the ledger, in whatever order: its invariants hold after each word."""

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from core.accounts import EntryKind
from core.ledger import Book, Expire
from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from core.money import EndCause, billed_micro, charge_micro
from core.protocol import Usage
from tests.support.ledger_commands import PRICES, a_reserve
from tests.support.ledger_strategies import HARD_CAPS, caps, commands, follow_ups, requests

FREEING = {EntryKind.SETTLE, EntryKind.RELEASE, EntryKind.EXPIRE}


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.book = Book(PRICES)
        for tenant, cap in HARD_CAPS.items():
            self.book.open_account(tenant, cap)
        self.refused = {}
        self.most = HARD_CAPS["a"]

    def say(self, command):
        book = self.book
        match command:
            case Reserve():
                return book.reserve(command)
            case TopUp():
                return book.top_up(command)
            case Settle():
                return book.settle(command)
            case Witness():
                return book.reconcile(command)
        raise AssertionError(command)

    @rule(command=commands)
    def a_word(self, command):
        self.say_twice(command)

    @precondition(lambda self: self.book.rows)
    @rule(command=follow_ups, data=st.data())
    def a_word_about_an_accepted_request(self, command, data):
        request_id = data.draw(st.sampled_from(sorted(self.book.rows)))
        changes = {"request_id": request_id}
        if not isinstance(command, Witness):
            changes["tenant_id"] = self.book.rows[request_id].asked.tenant_id
        self.say_twice(replace(command, **changes))

    def say_twice(self, command):
        answer = self.say(command)
        entries, accounts = list(self.book.entries), dict(self.book.accounts)
        assert self.say(command) == answer
        assert (self.book.entries, self.book.accounts) == (entries, accounts)
        if (
            isinstance(command, Reserve)
            and isinstance(answer, LedgerRefused)
            and answer.reason != "id_reused"
        ):
            self.refused[command.request_id] = answer

    @rule(request_id=requests)
    def the_sweeper_ends_one(self, request_id):
        word = Expire(request_id=request_id, ended_ms=9_999)
        self.book.expire(word)
        before = list(self.book.entries)
        assert self.book.expire(word) == LedgerRefused(reason="not_open")
        assert self.book.entries == before

    @rule(cap=caps)
    def the_cap_changes(self, cap):
        """The operator's word: one under what is held or posted takes nothing back."""
        self.book.set_terms("a", hard_cap_micro=cap)
        self.most = None if cap is None else max(cap, self.total())

    @precondition(lambda self: self.most is not None)
    @rule(left=st.integers(0, 5))
    def all_room_but_little_is_taken(self, left):
        room = self.most - self.total() - left
        if room > 0:
            name = f"fill{len(self.book.entries)}"
            self.book.reserve(a_reserve(name, tenant_id="a", amount_micro=room))

    @precondition(lambda self: self.refused)
    @rule(data=st.data())
    def the_refused_asks_again(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.refused)))
        asked = data.draw(commands.filter(lambda c: isinstance(c, Reserve)))
        again = self.say(replace(asked, request_id=request_id))
        assert not isinstance(again, Reserved)

    @invariant()
    def balances_are_the_fold_of_a_gapless_chain(self):
        for tenant, account in self.book.accounts.items():
            chain = [entry for entry in self.book.entries if entry.tenant_id == tenant]
            assert [entry.seq for entry in chain] == list(range(1, account.entries + 1))
            assert account.reserved_micro == sum(entry.reserved_delta_micro for entry in chain)
            assert account.posted_micro == sum(entry.posted_delta_micro for entry in chain)
            for before, after in pairwise(chain):
                assert after.reserved_micro == before.reserved_micro + after.reserved_delta_micro
                assert after.posted_micro == before.posted_micro + after.posted_delta_micro

    def total(self):
        account = self.book.accounts["a"]
        return account.reserved_micro + account.posted_micro

    @invariant()
    def nothing_goes_over_the_cap(self):
        if self.most is not None:
            assert self.total() <= self.most
            # Over a lowered cap it may only fall.
            self.most = max(self.book.accounts["a"].hard_cap_micro, self.total())

    @invariant()
    def each_reservation_is_held_or_ended_once(self):
        for request_id, row in self.book.rows.items():
            mine = [entry for entry in self.book.entries if entry.request_id == request_id]
            endings = [entry for entry in mine if entry.kind in FREEING]
            assert len(endings) == (row.cause is not None)
            held = sum(entry.reserved_delta_micro for entry in mine)
            assert held == (row.reserved_micro if row.cause is None else 0)
            for entry in endings:
                assert entry.posted_delta_micro <= -entry.reserved_delta_micro

    @invariant()
    def bills_are_the_policy_applied_to_metered(self):
        for request_id, row in self.book.rows.items():
            mine = [entry for entry in self.book.entries if entry.request_id == request_id]
            assert row.billed_micro == sum(entry.posted_delta_micro for entry in mine)
            if row.cause is not None:
                price = self.book.prices[row.asked.price_id]
                bill = self.policy(row, price)
                if row.bill_limit_micro is None:
                    assert row.billed_micro == bill
                else:
                    assert row.billed_micro == min(bill, row.bill_limit_micro)

    def policy(self, row, price):
        output = row.metered.output_tokens
        if row.cause is not EndCause.LOST:
            output = row.accepted_tokens
        output = min(output, row.asked.max_tokens * row.asked.choices)
        reasoning = min(row.metered.reasoning_tokens, output)
        usage = replace(row.metered, output_tokens=output, reasoning_tokens=reasoning)
        return billed_micro(row.cause, price, usage)

    @invariant()
    def no_bill_is_for_more_than_was_read_and_asked_for(self):
        for row in self.book.rows.values():
            price = self.book.prices[row.asked.price_id]
            asked = row.asked.max_tokens * row.asked.choices
            most = Usage(prompt_tokens=row.metered.prompt_tokens, output_tokens=asked)
            assert row.billed_micro <= charge_micro(price, most)
            assert row.accepted_tokens <= row.metered.output_tokens

    @invariant()
    def no_id_is_both_refused_and_accepted(self):
        assert not self.book.refusals.keys() & self.book.rows.keys()


TestLedgerMachine = LedgerMachine.TestCase
