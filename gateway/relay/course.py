"""A request's way along its plan: where it stands, what failed, and where it goes next.

One way, forward: it ends after so many targets, when its time is up, or when nothing in the
table answers for what went wrong. What a caller is told in the end is `fallback.told`.
"""

import msgspec

from core.errors import Refusal
from core.route_table import CAUSES, FallbackCause
from gateway.fallback import told
from gateway.route_plan import FIRST, Plan, Step

TARGETS_MAX = 5  # of one request, the first among them


class Failure(msgspec.Struct, frozen=True):
    """What came of a target, and why it was tried."""

    target: str
    reason: str
    refusal: Refusal


class Course:
    """Of one plan. `step` is where it stands; None is at its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tried: list[str] = []
        self._led_by: FallbackCause | None = None  # to this step, if anything failed before
        self.failures: list[Failure] = []
        self.step: Step | None = None
        if plan.first is None:
            self.failures.append(Failure("", "", plan.refusal))
            self._go(plan.lacks, FIRST)
        else:
            self._stand(plan.first)

    @property
    def name(self) -> str:
        """The public name that answers."""
        return self._plan.route.name

    @property
    def fallbacks(self) -> int:
        """How many targets were given up for another."""
        return max(0, len(self._tried) - (self._plan.first is not None))

    @property
    def told(self) -> Refusal:
        """What the caller hears when all has failed."""
        return told([failure.refusal for failure in self.failures])

    @property
    def may_go_on(self) -> bool:
        """Whether some failure of its target would lead to another."""
        step = self.step
        if step is None or not self._plan.route.spares:
            return False
        return any(self._after(step, cause) for cause in CAUSES)

    @property
    def first_token_ms(self) -> int:
        """How long its target may say nothing; 0 where nobody else would be asked."""
        step = self.step
        if step is None or not step.option.target.first_token_ms:
            return 0
        if self._after(step, "timeout") is None:
            return 0
        return step.option.target.first_token_ms

    def fail(self, refusal: Refusal, cause: FallbackCause | None, *, is_late: bool) -> None:
        """Its target failed: go on to the next, if there is one for this cause and time."""
        step = self.step
        assert step is not None, "it has ended"
        self.failures.append(Failure(step.option.name, step.reason, refusal))
        self.step = None
        if cause is not None and not is_late:
            self._go(cause, step.at)

    def skip(self, refusal: Refusal, cause: FallbackCause | None, *, is_late: bool) -> None:
        """Its target cannot even be asked for this. Only the first one's word is the caller's."""
        self.fail(refusal, cause or self._led_by, is_late=is_late)

    def _go(self, cause: FallbackCause, at: int) -> None:
        if len(self._tried) < TARGETS_MAX:
            self._led_by = cause
            step = self._plan.after(at, cause, self._tried)
            if step is not None:
                self._stand(step)

    def _after(self, step: Step, cause: FallbackCause) -> Step | None:
        if len(self._tried) >= TARGETS_MAX:
            return None
        return self._plan.after(step.at, cause, self._tried)

    def _stand(self, step: Step) -> None:
        self.step = step
        self._tried.append(step.option.name)
