"""Whether a grammar can be held to by the version a request is routed to, before it costs.

Compiled in threads, by the version's own vocabulary, and thrown away: what is remembered is
whether it compiles, and if not, why. Invariant: a grammar that a worker would refuse is a 400
that names its field, and nothing was counted, charged or held for it.
"""

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from core.errors import Code, refuse
from core.protocol import Grammar
from gateway.fields import bad
from gateway.prompts import Prompts
from text.grammar import GrammarError, Grammars

Key = tuple[str, bytes]


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of compiling."""

    threads: int = 2
    waiting_max: int = 256  # further requests with a grammar nobody has compiled get 503
    remembered_max: int = 4_096  # grammars, of which a hash and a message are kept
    versions_max: int = 16  # vocabularies kept in memory


class GrammarChecks:
    """Says which grammars compile; remembers."""

    def __init__(self, prompts: Prompts, limits: GrammarLimits | None = None) -> None:
        self._prompts = prompts
        self._limits = limits or GrammarLimits()
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="grammars")
        self._waiting = 0
        self._versions: OrderedDict[str, Grammars] = OrderedDict()
        self._faults: OrderedDict[Key, str | None] = OrderedDict()

    async def check(self, version: str, grammar: Grammar, param: str) -> None:
        """Raises RefusedError, naming the field `param`, or where too many are waiting."""
        key = (version, _hash(grammar))
        if key not in self._faults:
            self._remember(key, await self._fault(version, grammar))
        self._faults.move_to_end(key)
        fault = self._faults[key]
        if fault is not None:
            raise bad(param, fault)

    def close(self) -> None:
        """Stop the threads, when they have finished what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fault(self, version: str, grammar: Grammar) -> str | None:
        if self._waiting >= self._limits.waiting_max:
            raise refuse(Code.OVERLOADED, "Too many grammars are being compiled. Please retry.")
        grammars = await self._grammars(version)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, _compile, grammars, grammar)
        finally:
            self._waiting -= 1

    async def _grammars(self, version: str) -> Grammars:
        rules = await self._prompts.rules(version)
        known = self._versions.get(version)
        if known is None or known.vocabulary is not rules:
            known = self._versions[version] = Grammars(rules)
            while len(self._versions) > self._limits.versions_max:
                self._versions.popitem(last=False)
        self._versions.move_to_end(version)
        return known

    def _remember(self, key: Key, fault: str | None) -> None:
        self._faults[key] = fault
        while len(self._faults) > self._limits.remembered_max:
            self._faults.popitem(last=False)


def _compile(grammars: Grammars, grammar: Grammar) -> str | None:
    """Why it does not compile; None where it does."""
    try:
        grammars.compile(grammar)
    except GrammarError as error:
        return str(error)
    return None


def _hash(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode(errors="replace")).digest()
