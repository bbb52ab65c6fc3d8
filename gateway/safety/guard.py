"""A gateway's policies ready for use, and one request's.

A tenant without a policy costs a look at a field. A policy that this gateway cannot make ready
lets nothing through: its tenant asked for it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from core.errors import Code, RefusedError, refuse
from core.safety.policy import Assigned, Judge, Policy, Rule, Stage
from core.safety.rulebook import PolicyError, Rulebook
from core.tenancy import Tenant
from gateway.conversation import Conversation
from gateway.metrics import Metrics
from gateway.safety.classifier import classify
from gateway.safety.inputs import BlockedError, InputScreen
from gateway.safety.judged import JUDGED_CHARS_MAX, JudgedScreen, JudgeFaultError
from gateway.safety.output import OutputScreen
from gateway.safety.records import Noted, Records
from gateway.safety.sieve import Hit

_log = logging.getLogger(__name__)

AskJudge = Callable[[Judge, str], Awaitable[bool]]  # raises JudgeFaultError

BOOKS_MAX = 256  # versions of policies kept ready

JSON_KINDS = frozenset({"json_schema", "json_object"})
UNREADY = refuse(
    Code.UNAVAILABLE, "Your account's safety policy cannot be applied at the moment."
).refusal


class Guards:
    """One for each gateway."""

    def __init__(self, records: Records, now_ms: Callable[[], int]) -> None:
        self._records = records
        self._now_ms = now_ms
        self._books: OrderedDict[tuple[str, int], asyncio.Task[Rulebook]] = OrderedDict()

    async def of(self, tenant: Tenant, request_id: str) -> "Guard | None":
        """For one request; None where nothing is screened. Raises RefusedError."""
        assigned = tenant.safety
        if assigned is None:
            return None
        try:
            if assigned.policy is None:
                raise PolicyError("rules", "it says what this release does not know")  # noqa: TRY301 - one way to tell both
            book = await asyncio.shield(self._book(assigned, assigned.policy))
        except PolicyError as error:
            facts = {"policy": assigned.name, "version": assigned.version, "error": str(error)}
            _log.error("a safety policy cannot be made ready", extra={"facts": facts})
            raise RefusedError(UNREADY) from error

        def note(stage: Stage, choice: int, hit: Hit) -> None:
            self._records.note(
                Noted(
                    hit,
                    book.rules[hit.rule],
                    stage=stage,
                    choice=choice,
                    assigned=assigned,
                    tenant_id=tenant.id,
                    request_id=request_id,
                    at_ms=self._now_ms(),
                )
            )

        return Guard(book, note, self._records.metrics)

    def _book(self, assigned: Assigned, policy: Policy) -> asyncio.Task[Rulebook]:
        key = (assigned.name, assigned.version)
        making = self._books.get(key)
        if making is None or (making.done() and making.exception() is not None):
            # In a thread: thousands of terms take a while.
            making = asyncio.create_task(asyncio.to_thread(Rulebook, policy, classify))
            self._books[key] = making
            while len(self._books) > BOOKS_MAX:
                self._books.popitem(last=False)
        self._books.move_to_end(key)
        return making


class Guard:
    """One request's. `ask` puts a text to a judge; it raises whatever it likes for a fault."""

    def __init__(
        self, book: Rulebook, note: Callable[[Stage, int, Hit], None], metrics: Metrics
    ) -> None:
        self._book = book
        self._note = note
        self._metrics = metrics

    async def input(self, asked: Conversation, ask: AskJudge) -> Conversation:
        """What may be sent to a model. Raises RefusedError."""
        self._check_combination(asked)
        if not self._book.input:
            return asked
        if isinstance(asked.prompt, tuple):
            message = "prompt: your account's safety policy reads text, not token ids"
            raise refuse(Code.UNSUPPORTED, message, param="prompt")
        screen = InputScreen(self._book, lambda hit: self._note("input", 0, hit))
        try:
            screened = await screen.conversation(asked)
        except BlockedError as blocked:
            raise _refused(blocked.rule, asked) from blocked
        await self._judge(screened, ask)
        return screened

    async def _judge(self, asked: Conversation, ask: AskJudge) -> None:
        for number in self._book.input.judges:
            text = _said(asked)[-JUDGED_CHARS_MAX:]
            if not text or not await self._asked(number, text, ask, _unjudged):
                continue
            self._note("input", 0, Hit.of(number, text))
            if self._book.rules[number].action != "log":
                raise _refused(self._book.rules[number], asked)

    async def _asked(
        self, number: int, text: str, ask: AskJudge, closed: Callable[[], bool]
    ) -> bool:
        """Whether a judge's rule is hit; without a verdict, what the rule wants then."""
        rule = self._book.rules[number]
        assert isinstance(rule.detector, Judge)
        try:
            return await ask(rule.detector, text)
        except JudgeFaultError as error:
            facts = {"rule": rule.name, "model": rule.detector.model, "error": str(error)}
            _log.warning("a safety judge gave no verdict", extra={"facts": facts})
            self._metrics.safety_faults.labels("judge", rule.on_fault).inc()
            return rule.on_fault == "closed" and rule.action != "log" and closed()

    def output(self, asked: Conversation, ask: AskJudge) -> OutputScreen | JudgedScreen | None:
        """For its answer; None where nothing of it is screened."""
        if not self._book.output:
            return None

        def tell(choice: int, hit: Hit) -> None:
            self._note("output", choice, hit)

        is_json = asked.grammar is not None and asked.grammar.kind in JSON_KINDS
        screen = OutputScreen(self._book, choices=asked.n, is_json=is_json, tell=tell)
        if not self._book.output.judges:
            return screen
        return JudgedScreen(
            screen,
            self._book,
            choices=asked.n,
            ask=lambda number, text: self._asked(number, text, ask, lambda: True),
            tell=tell,
        )

    def _check_combination(self, asked: Conversation) -> None:
        """Tokens would tell what is masked, and an echo is no answer."""
        output, rules = self._book.output, self._book.rules
        if not output.acting and all(rules[n].action == "log" for n in output.judges):
            return
        for name, is_asked in (("logprobs", asked.logprobs is not None), ("echo", asked.echo)):
            if is_asked:
                message = f"{name}: your account's safety policy may change the answer's text"
                raise refuse(Code.UNSUPPORTED, message, param=name)


def _said(asked: Conversation) -> str:
    """What a judge of the request reads: all but what the model itself said."""
    turns = [turn.content for turn in asked.turns if turn.role != "assistant"]
    return "\n\n".join([*turns, asked.prompt] if isinstance(asked.prompt, str) else turns).strip()


def _unjudged() -> bool:
    raise refuse(Code.UNAVAILABLE, "Your account's safety policy could not be applied. Retry.")


def _refused(rule: Rule, asked: Conversation) -> RefusedError:
    message = f"The request was refused by your account's safety policy (rule '{rule.name}')."
    param = "prompt" if asked.kind == "text" else "messages"
    return refuse(Code.CONTENT_FILTER, message, param=param)
