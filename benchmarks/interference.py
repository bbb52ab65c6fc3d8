"""What does a long prompt do to those who are being answered?

Eight streams decode; then a prompt of 4,000 tokens arrives. ITL p95 of the eight before it and
until its first token, in three workers one after the other: as they are set up, with chunks but
no limit to them beside decodes, and with the whole prompt in one step. JSON.

    python -m benchmarks.interference
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.engine import STORE, conditions, pulled, say
from benchmarks.engine_load import Prompts, quantile
from benchmarks.engine_peers import Answer, OurWorker
from cli.models import faster_dtype

WORKERS = {
    "trimmed": {},
    "chunked": {"HEADWORKS_ITL_STRETCH": "0"},
    "whole": {"HEADWORKS_ITL_STRETCH": "0", "HEADWORKS_MAX_BATCHED_TOKENS": "8192"},
}


def main() -> None:
    print(json.dumps(asyncio.run(run(arguments())), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to pull")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=faster_dtype())
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long-tokens", type=int, default=4000)
    parser.add_argument("--own-tokens", type=int, default=200, help="of a stream's prompt")
    parser.add_argument("--output-tokens", type=int, default=400, help="of a stream")
    parser.add_argument("--lead-tokens", type=int, default=48, help="before the prompt arrives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default=",".join(WORKERS))
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="of all")
    options = parser.parse_args()
    options.shared_tokens, options.requests = 0, options.rounds
    return options


async def run(options: argparse.Namespace) -> dict[str, object]:
    _, manifest = await asyncio.to_thread(pulled, options.model, options.dtype)
    common = dict(pair.split("=", 1) for pair in options.env)
    told: dict[str, object] = {}
    for name in options.workers.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            worker = OurWorker(
                name,
                models=STORE,
                version=manifest.version,
                scratch=Path(scratch),
                environ=common | WORKERS[name],
            )
            say(f"starting {name}")
            try:
                await worker.start()
                prompts = Prompts(shared=0, own=options.own_tokens, seed=1)
                rounds = [await one_round(worker, prompts, options) for _ in range(options.rounds)]
            finally:
                await worker.stop()
        say(f"{name}: {rounds}")
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        told[name] = {
            **{key: round(value, 2) for key, value in medians.items()},
            "itl_p95_ratios": [round(each["itl_p95_ratio"], 2) for each in rounds],
        }
    question = {"question": "ITL p95 of streams while a long prompt is computed, over before it"}
    return {**conditions(options), **question, "long_tokens": options.long_tokens, "ms": told}


async def one_round(
    worker: OurWorker, prompts: Prompts, options: argparse.Namespace
) -> dict[str, float]:
    watched = [Answer(sent=time.perf_counter()) for _ in range(options.streams)]
    streams = [
        asyncio.create_task(worker.answer(prompt, options.output_tokens, answer))
        for prompt, answer in zip(prompts.take(options.streams), watched, strict=True)
    ]
    while min(len(answer.times) for answer in watched) < options.lead_tokens:  # noqa: ASYNC110 - they tell nobody
        await asyncio.sleep(0.02)
    arrival = time.perf_counter()
    long = await worker.answer(prompts.fresh(options.long_tokens), 1)
    answers = await asyncio.gather(*streams)
    settled = max(answer.times[0] for answer in answers)
    before = gaps(answers, settled, arrival)
    during = gaps(answers, arrival, long.times[0])
    base, held = quantile(before, 0.95), quantile(during, 0.95)
    return {
        "itl_p50_before": quantile(before, 0.5),
        "itl_p95_before": base,
        "itl_p50_during": quantile(during, 0.5),
        "itl_p95_during": held,
        "itl_max_during": max(during, default=0.0),
        "itl_p95_ratio": held / base if base else 0.0,
        "long_ttft": 1000 * (long.times[0] - long.sent),
        "gaps_before": float(len(before)),
        "gaps_during": float(len(during)),
    }


def gaps(answers: list[Answer], begin: float, end: float) -> list[float]:
    """In ms, of each stream, that begin in the window or are open when it begins."""
    return [
        1000 * (after - earlier)
        for answer in answers
        for earlier, after in itertools.pairwise(answer.times)
        if after > begin and earlier < end
    ]


if __name__ == "__main__":
    main()
