"""`python -m tests.soak.engine`: the engine on the real small model, at KV pressure, with aborts.

`SOAK_ENGINE_S` is for how long (1200), `SOAK_SEED` the seed of a run (a new one, printed).
"""

import logging
import os
import secrets
import sys
import tempfile
from pathlib import Path

from tests.support.engine_soak import Soak, soak_settings
from tests.support.small_model import SMALL_MODEL, small_model_store

PHASE_S = 60.0


def main() -> int:
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(10**9))
    seconds = float(os.environ.get("SOAK_ENGINE_S") or 1200)
    _tell(f"SOAK_SEED={seed} SOAK_ENGINE_S={seconds:.0f}")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        manifest = small_model_store(root).find(SMALL_MODEL)
        assert manifest is not None
        soak = Soak(soak_settings(root, manifest.version), seed, _tell)
        soak.run(seconds, phases=max(2, round(seconds / PHASE_S)))
        _tell(soak.report())
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
