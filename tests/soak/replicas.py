"""`python -m tests.soak.replicas`: the real worker killed under streams, and clients that leave.

`SOAK_REPLICA_KILLS` is how many kills (20), `SOAK_ABORTS` how many leave (400) while a gateway
is killed, `SOAK_SEED` the seed of a run (a new one, printed). `HEADWORKS_BATCH_INVARIANT=true`
makes a resumed greedy answer the undisturbed one to the bit; without it near-ties are told.
"""

import asyncio
import os
import secrets
import sys

from tests.support.abandonment import abandon, told
from tests.support.replica_kills import kill_workers
from tests.support.services import open_directory
from tests.support.stack import Stack


def main() -> int:
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(10**9))
    kills = int(os.environ.get("SOAK_REPLICA_KILLS") or 20)
    aborts = int(os.environ.get("SOAK_ABORTS") or 400)
    _tell(f"SOAK_SEED={seed} SOAK_REPLICA_KILLS={kills} SOAK_ABORTS={aborts}")
    with open_directory("replicas") as data:
        stack = Stack(data, gateways=2, workers=2)
        stack.up(environ={"HEADWORKS_THREADS": "1"})
        try:
            if kills:
                _tell(asyncio.run(kill_workers(stack, kills=kills, seed=seed)).report())
            if aborts:
                _tell(
                    f"{aborts} left: {told(asyncio.run(abandon(stack, aborts=aborts, seed=seed)))}"
                )
                stack.settles()
                _tell("headworks check: clean")
        finally:
            stack.down()
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
