"""`make soak`: kill everything a thousand times, and prove the books right each time.

`SOAK_KILLS` is how many kills (1000), `SOAK_SEED` the seed of a run (a new one, printed).
"""

import asyncio
import logging
import os
import secrets
import sys

from tests.support.kill_report import report
from tests.support.kill_run import run
from tests.support.kill_stack import a_stack


def main() -> int:
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(10**9))
    kills = int(os.environ.get("SOAK_KILLS") or 1_000)
    print(f"SOAK_SEED={seed} SOAK_KILLS={kills}", flush=True)
    logging.disable()  # Postgres that dies is what this is about
    with a_stack() as stack:
        tally = asyncio.run(run(stack, seed=seed, kills=kills, tell=_tell))
    print(report(tally))
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
