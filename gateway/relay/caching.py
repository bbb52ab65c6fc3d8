"""One job and the cache of answers: looked up before it is placed, kept when it is whole."""

from core.money import EndCause
from gateway.answer_cache import engine_message, repeatable
from gateway.cached_answers import CachedAnswers, Entry
from gateway.conversation import StreamEvent
from gateway.relay.cached_run import CachedRun
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.job import Job, Outcome
from gateway.relay.targets import AnyJob
from gateway.replay import Recorder


class Caching:
    """Nothing of an outside provider's is kept: what its answers follow from, it alone knows."""

    def __init__(self, answers: CachedAnswers, call: Call, job: AnyJob) -> None:
        self._answers = answers
        self._created_ms = call.created_ms
        self._request_id = job.request_id
        self._recorder = Recorder(answers.bytes_max)
        self._tokens_max = 0
        self._tokens = 0
        self._entry = self._entry_of(call, job)
        self.headers: dict[str, str] = {}

    async def find(self, channel: Channel) -> CachedRun | None:
        """The answer, if it is there; else what the channel hears is remembered."""
        entry = self._entry
        if entry is None:
            return None
        kept = await self._answers.find(entry)
        if kept is not None:
            self._entry = None
            self.headers = {"x-headworks-cache": "hit"}
            return CachedRun(kept, charge=entry.policy.charge, channel=channel)
        self.headers = {"x-headworks-cache": "miss"}
        channel.heard = self._hear
        return None

    def has(self, outcome: Outcome) -> bool:
        """Whether it has a whole answer that any repeat would have got.

        One that a budget cut short, or a safety policy, is this request's own.
        """
        if self._entry is None:
            return False
        if outcome.cause is EndCause.LENGTH:
            return self._tokens == self._tokens_max
        return outcome.cause is EndCause.COMPLETE

    async def keep(self) -> None:
        """For the next, unless it is too large."""
        answer = self._recorder.answer(self._created_ms)
        if answer and self._entry is not None:
            await self._answers.keep(self._entry, answer)

    def _entry_of(self, call: Call, job: AnyJob) -> Entry | None:
        if call.cache.wish == "off" or not isinstance(job, Job):
            return None
        if not repeatable(call.conversation, job.sampling):
            return None
        self._tokens_max = job.sampling.max_tokens * job.choices
        message = engine_message(
            version=job.model.version,
            prompt_ids=job.prompt_ids,
            choices=job.choices,
            sampling=job.sampling,
            salt=job.salt,
        )
        return self._answers.entry(call.identity.tenant.id, call.cache, call.conversation, message)

    def _hear(self, event: StreamEvent, tokens: int) -> None:
        self._tokens += tokens
        self._recorder.take(event, tokens, self._request_id)
