"""Is the engine, at c clients, at least as fast as transformers with a static batch of c?

Same weights, same type, same threads, one process, in turns. Closed loop: each client sends
its next prompt when its answer is complete; transformers gets all prompts of a round as one
batch. About nine tenths of a prompt are shared; greedy; end-of-text ignored. Prints JSON:
read the ratio, for the machine's speed changes from minute to minute.

    python -m benchmarks.engine_vs_transformers --model .local/models/versions/<hash>
"""

import argparse
import itertools
import json
import os
import queue
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from core.protocol import Choice, Finished, Generate, Sampling, Tokens
from tests.support.transformers_llama import transformers_llama
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.runner import compute_dtype, load_runner
from worker.weights import load_weights

VERSION = "benchmark"
SHARED_TOKENS, OWN_TOKENS = 186, 20


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    weights = load_weights(options.model, compute_dtype(options.dtype))
    reference = transformers_llama(weights)
    dice = random.Random(1)  # noqa: S311 - prompts, not secrets
    shared = [dice.randrange(3, weights.config.vocab_size) for _ in range(SHARED_TOKENS)]
    rounds: dict[str, list[dict[str, float]]] = {"headworks": [], "transformers": []}
    with an_engine(options) as engine:
        for _ in range(options.rounds):
            prompts = [
                shared + [dice.randrange(3, weights.config.vocab_size) for _ in range(OWN_TOKENS)]
                for _ in range(options.clients * options.requests)
            ]
            rounds["headworks"].append(engine_round(engine, prompts, options))
            rounds["transformers"].append(
                transformers_round(reference, prompts[: options.clients], options)
            )
    print(json.dumps(report(options, rounds), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model version's directory")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1, help="of each client in a round")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


@contextmanager
def an_engine(options: argparse.Namespace) -> Iterator[Engine]:
    blocks = options.clients * (SHARED_TOKENS + OWN_TOKENS + options.output_tokens + 32) // 16
    runner = load_runner(options.model, block_tokens=16, kv_blocks=2 * blocks, dtype=options.dtype)
    runner.warm_up(tokens=512)
    config = EngineConfig(
        kv_blocks=2 * blocks,
        context_tokens=runner.config.context_tokens,
        max_sequences=options.clients,
        waiting_tokens_max=1 << 20,
        version=VERSION,
        boot_id="boot",
    )
    engine = Engine(runner=runner, text=TextRules.load(options.model), config=config)
    engine.start()
    yield engine
    engine.stop(10)


def engine_round(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, float]:
    """Each event's time is taken on the engine's thread, as a gateway would see it."""
    told: queue.SimpleQueue[tuple[int, float, object]] = queue.SimpleQueue()
    times: list[list[float]] = [[] for _ in prompts]
    sent = [0.0] * len(prompts)

    def send(number: int) -> None:
        sent[number] = time.perf_counter()
        request = Generate(
            request_id=f"req_{time.perf_counter_ns()}",
            attempt=1,
            version=VERSION,
            prompt_ids=tuple(prompts[number]),
            choices=(Choice(index=0),),
            sampling=Sampling(
                seed=0, max_tokens=options.output_tokens, temperature=0.0, ignore_eos=True
            ),
            tenant_salt=b"",
        )

        def hear(events: Sequence[object]) -> None:
            for event in events:
                told.put((number, time.perf_counter(), event))

        assert engine.submit(request, hear) is None

    begin, waiting, open_ = time.perf_counter(), list(range(len(prompts)))[::-1], 0
    while waiting or open_:
        while waiting and open_ < options.clients:
            send(waiting.pop())
            open_ += 1
        number, at, event = told.get()
        if isinstance(event, Tokens):
            times[number].append(at)
        open_ -= isinstance(event, Finished)
    elapsed = time.perf_counter() - begin
    gaps = [after - before for t in times for before, after in itertools.pairwise(t)]
    return {
        "tokens_per_s": len(prompts) * options.output_tokens / elapsed,
        "ttft_p50_ms": 1000 * statistics.median(t[0] - s for t, s in zip(times, sent, strict=True)),
        "itl_p50_ms": 1000 * statistics.median(gaps),
    }


@torch.inference_mode()
def transformers_round(
    model: transformers.LlamaForCausalLM, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, float]:
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    produced = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.output_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - begin
    return {"tokens_per_s": (produced.shape[1] - ids.shape[1]) * len(prompts) / elapsed}


def report(
    options: argparse.Namespace, rounds: dict[str, list[dict[str, float]]]
) -> dict[str, object]:
    medians = {
        name: {key: round(statistics.median(r[key] for r in runs), 1) for key in runs[0]}
        for name, runs in rounds.items()
    }
    pairs = zip(rounds["headworks"], rounds["transformers"], strict=True)
    ratios = [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs]
    return {
        "question": "engine against transformers' static batch, output tokens per second",
        "clients": options.clients,
        "prompt_tokens": SHARED_TOKENS + OWN_TOKENS,
        "output_tokens": options.output_tokens,
        "dtype": options.dtype,
        "threads": options.threads,
        # Under the default policy threads spin while they wait for each other: right alone on
        # the machine, ruinous beside anything else that runs.
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **medians,
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
