"""The worker's own process, whose runner never returns from a step that is fed `STUCK`.

Fed `ALONE`, it does not even let another thread run.
"""

import ctypes
import sys
import threading

from worker.__main__ import main
from worker.settings import WorkerSettings
from worker.startup import LoadedModel, load_model
from worker.step import StepPlan, StepResult

STUCK, ALONE = 11, 12


def load(settings: WorkerSettings) -> LoadedModel:
    model = load_model(settings)
    runner = model._runner
    inner = runner.execute

    def execute(plan: StepPlan) -> StepResult:
        fed = {token for row in plan.rows for token in row.token_ids}
        if STUCK in fed:
            threading.Event().wait()
        if ALONE in fed:
            ctypes.PyDLL(None).pause()  # with the interpreter's lock
        return inner(plan)

    runner.execute = execute  # type: ignore[method-assign]  # it hangs, which is the point
    return model


if __name__ == "__main__":
    sys.exit(main(load))
