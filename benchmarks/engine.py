"""Our worker beside other engines on the same model and prompts: tokens/s, TTFT, ITL.

All are started first and take turns, round by round, so that a slow minute of the machine is
everybody's: read the ratios. JSON on standard output, progress on standard error.

    python -m benchmarks.engine --clients 1,8,32
    python -m benchmarks.engine --rate 2 --peer 'vllm=http://127.0.0.1:8801/v1'
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from artifacts.manifest import ComputeDtype, Manifest
from artifacts.pull import pull
from artifacts.store import ModelStore
from benchmarks.engine_load import Prompts, closed, opened, seen
from benchmarks.engine_peers import OpenAIServer, OurWorker, Peer
from benchmarks.engine_transformers import StaticBatch
from cli.models import faster_dtype

# Between two peers' turns: the threads of one spin on for up to a second after its last answer.
SETTLE_S = 3.0
STORE = Path(".local/benchmarks/models")
Figures = dict[str, float]


def main() -> None:
    print(json.dumps(asyncio.run(run(arguments())), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to pull")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=faster_dtype())
    parser.add_argument("--clients", default="1,8,32", help="closed loops, one after the other")
    parser.add_argument("--rate", type=float, default=0, help="instead: arrivals a second")
    parser.add_argument("--requests", type=int, default=2, help="of each client; open: in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared-tokens", type=int, default=186)
    parser.add_argument("--own-tokens", type=int, default=20)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL [COMMAND]")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    return parser.parse_args()


def pulled(model: str, dtype: ComputeDtype) -> tuple[ModelStore, Manifest]:
    """The benchmark's own store, so that nobody's deployments change."""
    store = ModelStore(STORE)
    return store, pull(model, store, compute_dtype=dtype)


async def run(options: argparse.Namespace) -> dict[str, object]:
    store, manifest = await asyncio.to_thread(pulled, options.model, options.dtype)
    environ = dict(pair.split("=", 1) for pair in options.env)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        ours = OurWorker(
            "headworks",
            models=STORE,
            version=manifest.version,
            scratch=scratch,
            environ=environ,
        )
        peers: list[Peer] = [ours, *(OpenAIServer(spec, scratch) for spec in options.peer)]
        static = StaticBatch(
            "transformers", model=store.directory(manifest.version), dtype=options.dtype
        )
        statics = [] if options.no_transformers else [static]
        everyone: list[Peer | StaticBatch] = [*peers, *statics]
        started: list[Peer | StaticBatch] = []
        try:
            for one in everyone:
                say(f"starting {one.name}")
                started.append(one)
                await one.start()
            levels = await measured(peers, statics, options)
            versions = {one.name: await one.versions() for one in everyone}
        finally:
            for one in reversed(started):
                await one.stop()
    return {**conditions(options), "versions": versions, "levels": levels}


async def measured(
    peers: list[Peer], statics: list[StaticBatch], options: argparse.Namespace
) -> dict[str, object]:
    prompts = Prompts(shared=options.shared_tokens, own=options.own_tokens, seed=1)
    for peer in peers:  # what is compiled, started or cached at first use
        await closed(peer, prompts.take(2), clients=2, max_tokens=8)
    if options.rate:
        return {f"{options.rate} requests/s": await level(peers, [], prompts, options, 0)}
    levels = [int(clients) for clients in options.clients.split(",")]
    return {
        f"{clients} clients": await level(peers, statics, prompts, options, clients)
        for clients in levels
    }


async def level(
    peers: list[Peer],
    statics: list[StaticBatch],
    prompts: Prompts,
    options: argparse.Namespace,
    clients: int,
) -> dict[str, object]:
    rounds: dict[str, list[Figures]] = defaultdict(list)
    for number in range(options.rounds):
        taken = prompts.take(options.requests * (clients or 1))
        # Who goes first changes, so that nobody always follows the same neighbour.
        turn = number % len(peers)
        for peer in (*peers[turn:], *peers[:turn]):
            await asyncio.sleep(SETTLE_S)
            if clients:
                told = await closed(peer, taken, clients=clients, max_tokens=options.output_tokens)
            else:
                told = await opened(
                    peer, taken, rate=options.rate, max_tokens=options.output_tokens
                )
            rounds[peer.name].append(seen(*told))
            say(f"{clients} {peer.name}: {rounds[peer.name][-1]}")
        for static in statics:
            speed = await static.tokens_per_s(taken[:clients], options.output_tokens)
            rounds[static.name].append({"tokens_per_s": speed})
            say(f"{clients} {static.name}: {speed:.1f}")
    return summary(rounds)


def summary(rounds: dict[str, list[Figures]]) -> dict[str, object]:
    """Medians of each figure, and ours over theirs in the same round."""
    ours, *others = rounds
    medians = {
        name: {key: round(statistics.median(each[key] for each in told), 1) for key in told[0]}
        for name, told in rounds.items()
    }
    ratios: dict[str, dict[str, object]] = {}
    for other in others:
        for key in rounds[other][0]:
            pairs = zip(rounds[ours], rounds[other], strict=True)
            each = [mine[key] / theirs[key] for mine, theirs in pairs if theirs[key]]
            if each and key != "cached_tokens":
                ratios.setdefault(f"{ours}/{other}", {})[key] = {
                    "median": round(statistics.median(each), 2),
                    "rounds": [round(ratio, 2) for ratio in each],
                }
    return {"medians": medians, "ratios": ratios}


def conditions(options: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - whichever git is in use here
        capture_output=True,
        text=True,
        check=False,
    )
    words = set(Path("/proc/cpuinfo").read_text().split())
    instructions = ("avx512f", "avx512_bf16", "amx_bf16")
    return {
        "question": "output tokens/s, TTFT and ITL of each engine on one model and prompts",
        "model": options.model,
        "dtype": options.dtype,
        "prompt_tokens": options.shared_tokens + options.own_tokens,
        "shared_tokens": options.shared_tokens,
        "output_tokens": options.output_tokens,
        "requests": options.requests,
        "cpus": os.cpu_count(),
        "instructions": [word for word in instructions if word in words],
        "load_average_1min": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
