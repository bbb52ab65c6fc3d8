"""transformers' `generate` with a static batch, as a process beside the benchmark.

Reads one JSON line {"prompts", "max_tokens"} at a time, answers {"tokens", "seconds"}. Rows
that end early are fed on, so every row has all its tokens: what a static batch is best at.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LINE_BYTES_MAX = 1 << 26


class StaticBatch:
    """Not a server: it takes all prompts of a round together."""

    def __init__(self, name: str, *, model: Path, dtype: str) -> None:
        self.name = name
        module = "benchmarks.engine_transformers"
        self._command = [sys.executable, "-m", module, "--model", str(model), "--dtype", dtype]
        self._running: asyncio.subprocess.Process | None = None
        self._versions: dict[str, str] = {}

    async def start(self) -> None:
        """Returns when the model is loaded."""
        self._running = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        self._versions = await self._line()

    async def tokens_per_s(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Of one batch, from its prompts to its last token."""
        assert self._running is not None
        assert self._running.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        self._running.stdin.write(json.dumps(asked).encode() + b"\n")
        told = await self._line()
        return float(told["tokens"]) / float(told["seconds"])

    async def versions(self) -> dict[str, str]:
        return self._versions

    async def stop(self) -> None:
        if self._running is not None:
            assert self._running.stdin is not None
            self._running.stdin.close()
            await self._running.wait()

    async def _line(self) -> dict[str, str]:
        assert self._running is not None
        assert self._running.stdout is not None
        told: dict[str, str] = json.loads(await self._running.stdout.readline())
        return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    # Here, because the benchmark reads this module to start it, and must not load torch beside it.
    import torch  # noqa: PLC0415 - the parent must not load it
    import transformers  # noqa: PLC0415 - the parent must not load it

    from tests.support.transformers_llama import transformers_llama  # noqa: PLC0415 - the parent must not load it
    from worker.weights import load_weights  # noqa: PLC0415 - the parent must not load it

    model = transformers_llama(load_weights(options.model, getattr(torch, options.dtype)))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        begin = time.perf_counter()
        with torch.inference_mode():
            produced = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked["max_tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        tokens = (produced.shape[1] - ids.shape[1]) * len(ids)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
