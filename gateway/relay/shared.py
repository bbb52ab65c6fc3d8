"""What every exchange of one gateway works with."""

from collections.abc import Awaitable, Callable

import msgspec

from gateway.books import Books
from gateway.cached_answers import CachedAnswers
from gateway.grammars import GrammarChecks
from gateway.metrics import Metrics
from gateway.prefixes import PrefixMemory
from gateway.prompts import Prompts
from gateway.relay.endings import Endings
from gateway.relay.hold import HoldLimits
from gateway.relay.job import Parts
from gateway.relay.targets import Outside
from gateway.routes import Routes
from gateway.safety.guard import Guards
from store.bindings import Bindings


class RelayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the registry and of each exchange."""

    exchanges_max: int = 2_048
    events_max: int = 256  # waiting for one response to read them
    overdue_grace_s: float = 2.0  # past a deadline, for the parts that keep it themselves
    slow_reader_s: float = 30.0  # a client that takes no byte for so long is cut
    checkpoint_age_s: float = 10.0
    drain_s: float = 20.0  # at shutdown, for answers to end by themselves
    settle_s: float = 10.0  # at shutdown, for what follows their ends


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Made once, in `app`."""

    gateway_id: str
    region: str
    routes: Routes
    prompts: Prompts
    grammars: GrammarChecks
    books: Books
    prefixes: PrefixMemory
    metrics: Metrics
    endings: Endings
    guards: Guards
    answers: CachedAnswers
    generation: Parts
    bindings: Bindings
    limits: RelayLimits
    hold_limits: HoldLimits
    now_ms: Callable[[], int]
    new_request_id: Callable[[], str]
    new_seed: Callable[[], int]
    renew_routes: Callable[[], Awaitable[None]]
    outside: Outside | None = None  # None: no provider is anybody's target
