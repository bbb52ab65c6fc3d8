"""What a generation is asked for, what it works with, and what it ends with."""

import asyncio

import msgspec

from core.errors import Code, Refusal
from core.money import EndCause, Price
from core.protocol import CacheMark, Sampling
from core.registry import ServedModel
from core.route_table import FallbackCause
from core.tickets import Arm
from gateway.metrics import Metrics
from gateway.relay.shortage import Shortage
from gateway.replica_health import ReplicaHealth
from gateway.routes import Routes
from gateway.tools.plan import ToolPlan
from gateway.worker_client import WorkerClient
from store.dispatch import Dispatch
from store.failures import Failures
from text.rules import TextRules

FAULT = Refusal(code=Code.INTERNAL, message="The model failed to answer. Please retry.")
DIED = Refusal(code=Code.UNAVAILABLE, message="The model's replica was lost. Please retry.")
BUSY = Refusal(code=Code.OVERLOADED, message="This model is overloaded. Please retry.")
OVERDUE = Refusal(code=Code.TIMEOUT, message="The answer was not finished by its deadline.")


class GenerationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much goes wrong before a request is given up, and how long an abort may take."""

    deaths_max: int = 3
    nacked_s: float = 60.0  # of being declined again and again, within its deadline
    unsent_s: float = 15.0  # of trying replicas that cannot be reached
    pause_min_s: float = 0.05  # before such a try is repeated, doubling
    pause_max_s: float = 1.0
    abort_s: float = 1.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. An answer that is not whole is told with the refusal, if any."""

    cause: EndCause
    refusal: Refusal | None = None
    fallback: FallbackCause | None = None  # what it failed for, where the refusal does not tell

    @property
    def whole(self) -> bool:
        """Whether the client has been told all there is."""
        return self.cause in {EndCause.COMPLETE, EndCause.LENGTH, EndCause.FILTERED}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated. `arm` asks for its first place."""

    request_id: str
    model: ServedModel
    price: Price
    prompt_ids: tuple[int, ...]
    cache_marks: tuple[CacheMark, ...]
    sampling: Sampling
    choices: int
    wants_chances: bool
    echo: str  # that each answer begins with
    rules: TextRules
    tools: ToolPlan | None
    salt: bytes
    arm: Arm


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What every generation of this gateway works with."""

    dispatch: Dispatch
    workers: WorkerClient
    routes: Routes
    metrics: Metrics
    limits: GenerationLimits
    health: ReplicaHealth
    failures: Failures
    shortage: Shortage
    fingerprint_key: bytes
    beside: set[asyncio.Task[None]]  # work that outlives its generation, kept until it is done
