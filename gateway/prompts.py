"""Conversations into prompt ids, by the text rules of the version they are routed to.

Rules are loaded once for each version, from verified files. Long texts are encoded in a
thread, where the encoder releases the interpreter; short ones are quicker here. Invariant:
nothing larger than a model's context could be is ever encoded.
"""

import asyncio
import datetime as dt
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from artifacts.errors import CorruptError, UnknownModelError
from artifacts.store import ModelStore
from core.errors import Code, refuse
from core.protocol import CacheMark
from gateway.chats import beginnings, chat_of
from gateway.conversation import CacheBreak, Conversation
from text.chat import Chat, TextRefusedError
from text.memory import RunMemory
from text.parts import TokenizerFilesError
from text.rules import TextRules

_log = logging.getLogger(__name__)

# A normaliser may shorten a text before it is cut into tokens; four times is far beyond any.
SHRINKING_MAX = 4


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of encoding."""

    inline_chars: int = 2_000  # up to here a thread costs more than it saves
    threads: int = 2
    waiting_max: int = 256  # long texts that wait for a thread; further ones get 503
    versions_max: int = 16  # rules kept in memory
    memories_max: int = 64  # of tenants' latest texts, each with one version
    memory_bytes: int = 1 << 20  # of one of those: about 130,000 tokens


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a model reads, and up to where it is asked to be kept."""

    ids: tuple[int, ...]
    marks: tuple[CacheMark, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    rules: TextRules
    token_bytes_max: int


class Prompts:
    """Text rules by version, and the threads that run them."""

    def __init__(self, store: ModelStore, limits: PromptLimits, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._limits = limits
        self._now_ms = now_ms
        self._versions: OrderedDict[str, asyncio.Task[_Version]] = OrderedDict()
        self._memories: OrderedDict[tuple[str, str], RunMemory] = OrderedDict()
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="prompts")
        self._waiting = 0

    async def rules(self, version: str) -> TextRules:
        """Raises RefusedError when this gateway does not have the version's files."""
        return (await self._version(version)).rules

    def want(self, version: str) -> None:
        """Start loading its rules, if nobody has: a request will ask for them."""
        self._loading(version)

    async def prompt(self, version: str, conversation: Conversation, *, tenant: str = "") -> Prompt:
        """The prompt. Raises RefusedError: text the model cannot take, or far too much of it.

        What this `tenant` has lately sent to this version is not encoded again.
        """
        known = await self._version(version)
        if isinstance(conversation.prompt, tuple):
            return Prompt(ids=_checked(conversation.prompt, known.rules))
        chat = chat_of(conversation)
        chars = len(conversation.prompt) + sum(map(len, chat.texts()))
        _refuse_hopeless(chars, known)
        memory = self._memory(tenant, version) if tenant else None
        try:
            if chars <= self._limits.inline_chars:
                prompt = self._encode(known.rules, conversation, chat, memory)
            else:
                prompt = await self._encode_in_thread(known.rules, conversation, chat, memory)
        except TextRefusedError as error:
            raise refuse(Code.BAD_REQUEST, f"{error}.", param=_param(conversation)) from error
        if not prompt.ids:
            raise refuse(Code.BAD_REQUEST, "The prompt is empty.", param=_param(conversation))
        return prompt

    async def ids(self, version: str, conversation: Conversation) -> tuple[int, ...]:
        """The prompt's alone, for counting. Raises RefusedError."""
        plain = msgspec.structs.replace(conversation, cache_breaks=())
        return (await self.prompt(version, plain)).ids

    def close(self) -> None:
        """Stop the threads, when they have finished what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _version(self, version: str) -> _Version:
        loading = self._loading(version)
        try:
            return await asyncio.shield(loading)
        except (UnknownModelError, CorruptError, TokenizerFilesError, TextRefusedError) as error:
            self._versions.pop(version, None)  # the files may yet come
            raise refuse(
                Code.UNAVAILABLE, "This model is not available at the moment. Please retry."
            ) from error

    def _loading(self, version: str) -> asyncio.Task[_Version]:
        loading = self._versions.get(version)
        if loading is None:
            loading = asyncio.create_task(self._load(version))
            loading.add_done_callback(_tell_failure)
            self._versions[version] = loading
            while len(self._versions) > self._limits.versions_max:
                self._versions.popitem(last=False)
        self._versions.move_to_end(version)
        return loading

    async def _load(self, version: str) -> _Version:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._read_version, version
        )

    def _read_version(self, version: str) -> _Version:
        rules = TextRules.load(self._store.directory(version))
        longest = max(len(rules.token_bytes(i)) for i in range(rules.vocab_size))
        assert rules.tool_format  # found out here, in a thread, and remembered
        return _Version(rules, longest)

    def _memory(self, tenant: str, version: str) -> RunMemory:
        """The tenant's own: see `text.memory`."""
        memory = self._memories.get((tenant, version))
        if memory is None:
            memory = self._memories[tenant, version] = RunMemory(self._limits.memory_bytes)
            while len(self._memories) > self._limits.memories_max:
                self._memories.popitem(last=False)
        self._memories.move_to_end((tenant, version))
        return memory

    async def _encode_in_thread(
        self, rules: TextRules, conversation: Conversation, chat: Chat, memory: RunMemory | None
    ) -> Prompt:
        if self._waiting >= self._limits.waiting_max:
            raise refuse(Code.OVERLOADED, "Too many long prompts are waiting. Please retry.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._encode, rules, conversation, chat, memory
            )
        finally:
            self._waiting -= 1

    def _encode(
        self, rules: TextRules, conversation: Conversation, chat: Chat, memory: RunMemory | None
    ) -> Prompt:
        if conversation.kind == "text":
            assert isinstance(conversation.prompt, str)
            return Prompt(ids=tuple(rules.plain_ids(conversation.prompt)))
        today = dt.datetime.fromtimestamp(self._now_ms() / 1000, dt.UTC).date()
        breaks = conversation.cache_breaks
        made = rules.prompt(chat, beginnings(chat, breaks), day=today, memory=memory)
        return Prompt(ids=tuple(made.ids), marks=_marks(breaks, made.shared))


def _tell_failure(loading: asyncio.Task[_Version]) -> None:
    if not loading.cancelled() and loading.exception() is not None:
        _log.error("a model's text rules cannot be loaded", exc_info=loading.exception())


def _checked(ids: tuple[int, ...], rules: TextRules) -> tuple[int, ...]:
    if not ids:
        raise refuse(Code.BAD_REQUEST, "The prompt is empty.", param="prompt")
    if not all(0 <= i < rules.vocab_size for i in ids):
        message = f"Token ids of this model are from 0 to {rules.vocab_size - 1}."
        raise refuse(Code.BAD_REQUEST, message, param="prompt")
    return ids


def _refuse_hopeless(chars: int, known: _Version) -> None:
    """A text so long that no way of cutting it fits the context is not worth cutting."""
    context = known.rules.context_tokens
    if chars > context * known.token_bytes_max * SHRINKING_MAX:
        raise refuse(
            Code.CONTEXT_LENGTH,
            f"This model's maximum context length is {context} tokens. Your prompt has {chars} "
            "characters, which cannot fit.",
            param="messages",
        )


def _marks(breaks: tuple[CacheBreak, ...], shared: tuple[int, ...]) -> tuple[CacheMark, ...]:
    """One for each place that has tokens before it; those of an hour come first, and stay."""
    kept: dict[int, CacheMark] = {}
    for place, tokens in zip(breaks, shared, strict=True):
        if tokens:
            kept.setdefault(tokens, CacheMark(tokens=tokens, ttl=place.ttl))
    return tuple(kept.values())


def _param(conversation: Conversation) -> str:
    return "prompt" if conversation.kind == "text" else "messages"
