"""What gateways tell each other of failures: the fleet's retry budget, and suspect requests.

Valkey decides for everyone. While it is away each gateway has a budget of its own, and goes by
the deaths that it has seen itself, which it tells when Valkey is back. A healthy request costs
no call; the list of suspects comes with `poll`.
"""

import logging
from collections.abc import Callable

import msgspec

from core.deaths import DeathRules, Deaths, Listed
from core.retries import RetryBudget, RetryRules
from store.dispatch_rules import now_ms
from store.keys import DEATH_KEYS, RETRY_KEYS
from store.redis_client import RedisAwayError, RedisClient, RedisReplyError
from store.scripts import failure_functions

_log = logging.getLogger(__name__)

_read_listed = msgspec.msgpack.Decoder(list[tuple[str, int, int]]).decode


class FailureRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one gateway's side, and the rules that decisions go by."""

    call_timeout_ms: int = 500
    retries: RetryRules = RetryRules()
    deaths: DeathRules = DeathRules()


class Failures:
    """One gateway's side. Raises nothing: without an answer it decides by itself."""

    def __init__(
        self, redis_url: str, rules: FailureRules, clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self._rules = rules
        self._now_ms = clock_ms
        self._functions = failure_functions(rules.retries, rules.deaths)
        self._client = RedisClient(
            redis_url,
            libraries=[self._functions.spend_retry.library],
            timeout_ms=rules.call_timeout_ms,
        )
        self._budget = RetryBudget(rules.retries)
        self._deaths = Deaths(rules.deaths)
        self._suspects: dict[str, tuple[int, int]] = {}  # fingerprint: deaths, until when
        self._untold: list[tuple[str, str]] = []  # deaths that Valkey did not take
        self._new_requests = 0

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    # The retry budget.

    def began(self) -> None:
        """A request begins: it counts when it is told of, with the next call."""
        self._new_requests += 1

    async def may_retry(self) -> bool:
        """Take one retry from the fleet's budget; False where it is used up."""
        return await self._spend(1)

    async def _spend(self, wanted: int) -> bool:
        requests, self._new_requests = self._new_requests, 0
        alone = self._budget.spend(requests=requests, wanted=wanted, now_ms=self._now_ms())
        try:
            answer = await self._client.run(
                self._functions.spend_retry, RETRY_KEYS, "", requests, wanted
            )
        except (RedisAwayError, RedisReplyError) as error:
            _tell("the retry budget is this gateway's own", error)
            return alone
        return answer == 1

    # Requests under which replicas die.

    @property
    def has_suspects(self) -> bool:
        """Whether there is any to look out for: a fingerprint costs a hash of the prompt."""
        return bool(self._suspects)

    def deaths(self, fingerprint: str) -> int:
        """How many replicas are known to have died under it."""
        deaths, until_ms = self._suspects.get(fingerprint, (0, 0))
        return deaths if self._now_ms() < until_ms else 0

    def refused_ms(self, fingerprint: str) -> int | None:
        """For how long yet such a request is refused; None for one that is not."""
        deaths, until_ms = self._suspects.get(fingerprint, (0, 0))
        left_ms = until_ms - self._now_ms()
        return left_ms if deaths >= self._rules.deaths.deaths and left_ms > 0 else None

    async def record_death(self, fingerprint: str, boot_id: str) -> None:
        """A replica's life ended under it."""
        deaths = self._deaths.record(fingerprint, boot_id, self._now_ms())
        try:
            deaths = await self._tell_death(fingerprint, boot_id)
        except (RedisAwayError, RedisReplyError) as error:
            _tell("a replica's death is known to this gateway alone", error)
            if len(self._untold) < self._rules.deaths.kept_max:
                self._untold.append((fingerprint, boot_id))
        self._suspects[fingerprint] = (deaths, self._now_ms() + self._rules.deaths.refuse_ms)

    async def absolve(self, fingerprint: str) -> None:
        """It has been answered after all."""
        if self.refused_ms(fingerprint) is not None:
            return
        self._suspects.pop(fingerprint, None)
        self._deaths.absolve(fingerprint)
        try:
            await self._client.run(self._functions.absolve_death, DEATH_KEYS, "", fingerprint)
        except (RedisAwayError, RedisReplyError) as error:
            _tell("a request stays under suspicion", error)

    async def poll(self) -> None:
        """Tell of new requests, and hear who is suspected now."""
        if self._new_requests:
            await self._spend(0)
        now = self._now_ms()
        try:
            listed = await self._list_deaths()
        except (RedisAwayError, RedisReplyError):
            self._suspects = {name: told for name, told in self._suspects.items() if told[1] > now}
            return
        self._suspects = {one.fingerprint: (one.deaths, now + one.left_ms) for one in listed}
        for name in self._deaths.suspects.keys() - self._suspects.keys():
            self._deaths.forget(name)  # answered since, at another gateway

    async def _list_deaths(self) -> list[Listed]:
        while self._untold:
            await self._tell_death(*self._untold[-1])
            self._untold.pop()
        answer = await self._client.run(self._functions.list_deaths, DEATH_KEYS, "")
        assert isinstance(answer, bytes)
        return [Listed(*one) for one in _read_listed(answer)]

    async def _tell_death(self, fingerprint: str, boot_id: str) -> int:
        answer = await self._client.run(
            self._functions.record_death, DEATH_KEYS, "", fingerprint, boot_id
        )
        assert isinstance(answer, int)
        return answer


def _tell(what: str, error: Exception) -> None:
    _log.warning(what, extra={"facts": {"error": str(error)}})
