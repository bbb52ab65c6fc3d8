"""What does a gateway cost? Ours governed and not, any other by URL, and no gateway at all.

The engine answers at once, or at a pace; gateways run alone on one core, everything else on
the others. All take turns, round by round: read the ratios. JSON on standard output.

    python -m benchmarks.gateway
    python -m benchmarks.gateway --peer 'litellm=http://127.0.0.1:4000/v1,sk-1234,mock COMMAND'

In a peer's COMMAND, {mock} is the engine's OpenAI address.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.engine_load import quantile
from benchmarks.gateway_stack import Child, Stack, gateway_stack, set_pace
from benchmarks.http_load import Seen, Target, closed, request_of

PROMPT = "What does a gateway in front of a model cost, in milliseconds and in money? " * 3
UNARY_TOKENS = 16
STREAM_TOKENS = 64
PACE_MS = 20.0
STALL_S = 0.1
PEER_START_S = 180.0
Figures = dict[str, float]


def main() -> None:
    options = arguments()
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if len(cores) > 1 else None
    with gateway_stack(core=core, bare=not options.no_bare) as stack, ExitStack() as peers:
        os.sched_setaffinity(0, set(cores) - {core} or {cores[0]})
        for spec in options.peer:
            target, child = peers.enter_context(peer_of(spec, stack, core))
            stack.targets.append(target)
            if child is not None:
                stack.gateways[target.name] = child
        told = asyncio.run(measured(stack, options))
    print(json.dumps({**conditions(options), **told}, indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each closed loop")
    parser.add_argument("--streams", type=int, default=512, help="at once, at 20 ms a delta")
    parser.add_argument("--peer-streams", type=int, default=64, help="the same, of each peer")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL,KEY,MODEL [CMD]")
    parser.add_argument("--no-bare", action="store_true", help="only the governed gateway")
    return parser.parse_args()


@contextmanager
def peer_of(spec: str, stack: Stack, core: int | None) -> Iterator[tuple[Target, Child | None]]:
    """Any server with OpenAI's chat completions, started if it has a command."""
    name, _, rest = spec.partition("=")
    where, *command = shlex.split(rest)
    url, key, model = where.split(",")
    target = Target(name=name, url=url, key=key, model=model)
    if not command:
        yield target, None
        return
    argv = [part.replace("{mock}", f"{stack.mock_url}/v1") for part in command]
    with tempfile.TemporaryDirectory() as at:
        child = Child(argv, env={}, log=Path(at) / "log", core=core)
        try:
            await_peer(target, child, Path(at) / "log")
            yield target, child
        finally:
            child.stop()


def await_peer(target: Target, child: Child, log: Path) -> None:
    """Until it answers one request."""
    deadline = time.monotonic() + PEER_START_S
    messages = [{"role": "user", "content": "x"}]
    body = {"model": target.model, "messages": messages, "max_tokens": 1}
    headers = {"authorization": f"Bearer {target.key}"}
    while True:
        if child.ended() or time.monotonic() > deadline:
            raise RuntimeError(log.read_text()[-2000:])
        try:
            url = f"{target.url}/chat/completions"
            httpx.post(url, json=body, headers=headers, timeout=10).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return


async def measured(stack: Stack, options: argparse.Namespace) -> dict[str, object]:
    rounds: dict[str, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    everyone = [stack.direct, *stack.targets]
    for number in range(options.rounds):
        turn = number % len(everyone)
        for target in (*everyone[turn:], *everyone[:turn]):
            for question, figures in await answers(target, stack, options):
                rounds[question][target.name].append(figures)
                say(f"{number} {target.name} {question}: {figures}")
    return {question: summary(told) for question, told in rounds.items()}


async def answers(
    target: Target, stack: Stack, options: argparse.Namespace
) -> list[tuple[str, Figures]]:
    """One round of every question to one target."""
    child = stack.gateways.get(target.name)
    ours = target.name in {"headworks", "ungoverned", "direct"}
    unary = request_of(target, prompt=PROMPT, max_tokens=UNARY_TOKENS, stream=False)
    stream = request_of(target, prompt=PROMPT, max_tokens=STREAM_TOKENS, stream=True)
    set_pace(stack.mock_url)
    await closed(target, unary, clients=1, requests=50)
    await asyncio.sleep(0.5)
    found = [("unary c=1", await loop(target, child, unary, 1, options.seconds))]
    found.append(("unary c=32", await loop(target, child, unary, 32, options.seconds)))
    found.append(("burst streams c=8", await loop(target, child, stream, 8, options.seconds)))
    set_pace(stack.mock_url, first_ms=PACE_MS, interval_ms=PACE_MS)
    streams = options.streams if ours else options.peer_streams
    told, _ = await closed(target, stream, clients=streams, requests=1)
    found.append((f"{streams} streams at {PACE_MS:.0f} ms", paced(told)))
    set_pace(stack.mock_url)
    return found


async def loop(
    target: Target, child: Child | None, request: bytes, clients: int, seconds: float
) -> Figures:
    """A closed loop. CPU is the gateway's, in microseconds a request."""
    used_s = child.cpu_s if child is not None else 0.0
    told, took_s = await closed(target, request, clients=clients, seconds=seconds)
    totals = [1000 * seen.total_s for seen in told]
    figures = {
        "requests_per_s": len(told) / took_s,
        "p50_ms": quantile(totals, 0.5),
        "p99_ms": quantile(totals, 0.99),
    }
    if any(seen.events for seen in told):
        figures["deltas_per_s"] = sum(seen.events for seen in told) / took_s
    if child is not None:
        figures["cpu_us"] = 1e6 * (child.cpu_s - used_s) / len(told)
        figures["memory_mb"] = child.memory_mb
    return figures


def paced(told: list[Seen]) -> Figures:
    """How evenly streams came that are paced by the engine."""
    gaps = [1000 * seen.gap_s for seen in told]
    return {
        "ttft_p99_ms": quantile([1000 * seen.first_s for seen in told], 0.99),
        "gap_p50_ms": quantile(gaps, 0.5),
        "gap_max_ms": max(gaps),
        "stalled_streams": sum(seen.gap_s > STALL_S for seen in told),
        "events": sum(seen.events for seen in told),
    }


def summary(told: dict[str, list[Figures]]) -> dict[str, object]:
    """Medians; what each gateway adds to no gateway; ours over each other in the same round."""
    medians = {
        name: {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}
        for name, rounds in told.items()
    }
    direct = told.get("direct", [])
    added = {
        name: {
            key: round(
                statistics.median(
                    one[key] - none[key] for one, none in zip(rounds, direct, strict=True)
                ),
                3,
            )
            for key in ("p50_ms", "p99_ms")
        }
        for name, rounds in told.items()
        if name != "direct" and direct and "p50_ms" in rounds[0]
    }
    ratios = {
        f"headworks/{name}": {
            key: round(
                statistics.median(
                    mine[key] / theirs[key]
                    for mine, theirs in zip(told["headworks"], rounds, strict=True)
                    if theirs[key]
                ),
                2,
            )
            for key in ("requests_per_s", "deltas_per_s", "p99_ms", "cpu_us")
            if key in rounds[0] and key in told["headworks"][0]
        }
        for name, rounds in told.items()
        if "headworks" in told and name not in {"headworks", "direct"}
    }
    return {"medians": medians, "added": added, "ratios": ratios}


def conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "question": "what a gateway adds to an engine that answers at once, and how much it bears",
        "governed": "authentication, limits in Valkey, reserve and settle in Postgres",
        "rounds": options.rounds,
        "seconds": options.seconds,
        "prompt_chars": len(PROMPT),
        "unary_tokens": UNARY_TOKENS,
        "stream_tokens": STREAM_TOKENS,
        "cpus": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 1),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
