"""Where one step's time goes: decodes of 1, 8 and 32 sequences at three lengths, one prefill.

The real stepper, scheduler, runner and text rules on the bundled model, without a network;
each part is timed where it is called. Medians over steps; the parts of a layer are sums over
all layers. A table on standard error, JSON on standard output.

    python -m benchmarks.step --threads 2
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine import pulled
from benchmarks.engine_load import Prompts
from cli.models import faster_dtype
from core.protocol import Choice, Generate, Sampling
from text.rules import TextRules
from worker.generation import open_generation
from worker.runner import ModelRunner, load_runner
from worker.stepper import EngineConfig, Live, Stepper

VERSION = "benchmark"
WARM_STEPS = 3


class Parts:
    """Time by name, within the step that runs."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `name`."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            self.now[name] += time.perf_counter() - begin
            return result

        return wrapped

    def end_step(self) -> None:
        """What was timed since the last one was one step."""
        self.steps.append(dict(self.now))
        self.now.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to pull")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=faster_dtype())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="100,500,2000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    store, manifest = pulled(options.model, options.dtype)
    directory = store.directory(manifest.version)
    batches = [int(batch) for batch in options.batches.split(",")]
    contexts = [int(context) for context in options.contexts.split(",")]
    positions = max(batches) * (max(contexts) + options.steps + 64)
    runner = load_runner(
        directory,
        block_tokens=options.block_tokens,
        kv_blocks=positions // options.block_tokens,
        dtype=options.dtype,
        batch_invariant=options.batch_invariant,
    )
    runner.warm_up(tokens=512)
    parts = Parts()
    watch(runner, parts)
    text = TextRules.load(directory)
    told = {
        f"decode {batch} at {context}": measured(
            runner, text, parts, batch=batch, context=context, steps=options.steps
        )
        for batch in batches
        for context in contexts
    }
    told["prefill 512"] = measured(runner, text, parts, batch=1, context=512, steps=0)
    print(table(told), file=sys.stderr)
    facts = {"dtype": options.dtype, "threads": options.threads, "block": options.block_tokens}
    print(json.dumps({**facts, "torch": torch.__version__, "ms": told}, indent=2))


def watch(runner: ModelRunner, parts: Parts) -> None:
    """Time the calls that a step is made of, at the objects that make them."""
    model = runner._model  # noqa: SLF001 - this is about what is inside
    for layer in model._layers:  # noqa: SLF001 - as above
        for name, part in (
            ("qkv", "qkv"), ("attention_out", "out"), ("gated", "mlp"), ("down", "mlp"),
        ):  # fmt: skip
            linear = getattr(layer, name)
            object.__setattr__(layer, name, _Watched(linear, part, parts))
    model._head = _Watched(model._head, "head", parts)  # type: ignore[assignment]  # noqa: SLF001 - stands in for it
    kernels = model._kernels  # noqa: SLF001 - as above
    model._kernels = dataclasses.replace(  # noqa: SLF001 - as above
        kernels,
        rms_norm=parts.timed("norms", kernels.rms_norm),
        rope_in_place=parts.timed("rope", kernels.rope_in_place),
    )
    for owner, name, part in (
        (model.attention, "plan", "attention plan"),
        (model.attention, "write", "kv write"),
        (model.attention, "attend", "attention"),
        (runner._sampler, "sample", "sampling"),  # noqa: SLF001 - as above
        (model, "hidden", "forward"),
        (model, "logits", "forward"),
        (runner, "execute", "runner"),
    ):
        setattr(owner, name, parts.timed(part, getattr(owner, name)))


class _Watched:
    """A linear layer, each of whose ways to be called is timed."""

    def __init__(self, linear: Any, part: str, parts: Parts) -> None:
        self._call = parts.timed(part, linear)
        if hasattr(linear, "plus"):
            self.plus = parts.timed(part, linear.plus)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def measured(
    runner: ModelRunner, text: TextRules, parts: Parts, *, batch: int, context: int, steps: int
) -> dict[str, float]:
    """Medians in ms of `steps` decodes; of five prefills where `steps` is 0."""
    parts.now.clear()
    parts.steps.clear()
    for attempt in range(1 if steps else 5):
        stepper = a_stepper(runner, text, batch)
        prompts = Prompts(shared=0, own=context, seed=attempt).take(batch)
        for number, prompt in enumerate(prompts):
            # The first ones decode while the last ones are still prefilled.
            stepper.take(a_live(text, prompt, number, steps + WARM_STEPS + 1 + batch))
        while stepper.scheduler.waiting or any(
            sequence.remaining > 1 for sequence in stepper.scheduler.running
        ):
            step(stepper, parts)
        if steps:
            parts.steps.clear()
        for _ in range(steps + WARM_STEPS if steps else 0):
            step(stepper, parts)
    return {
        name: round(
            1000 * statistics.median(s.get(name, 0.0) for s in parts.steps[-max(steps, 5) :]), 3
        )
        for name in dict.fromkeys(itertools.chain.from_iterable(parts.steps))
    }


def step(stepper: Stepper, parts: Parts) -> None:
    begin = time.perf_counter()
    plan = stepper.plan(0)
    planned = time.perf_counter()
    assert plan is not None
    stepper.execute(plan)
    end = time.perf_counter()
    now = parts.now
    now["step"], now["scheduler"] = end - begin, planned - begin
    now["text and events"] = end - planned - now["runner"]
    now["runner, rest"] = (
        now.pop("runner") - now["forward"] - now["sampling"] - now["attention plan"]
    )
    inside = ("qkv", "out", "mlp", "head", "norms", "rope", "kv write", "attention")
    now["forward, rest"] = now.pop("forward") - sum(now[name] for name in inside)
    parts.end_step()


def a_stepper(runner: ModelRunner, text: TextRules, batch: int) -> Stepper:
    def sink_error(name: str, error: Exception) -> None:
        raise RuntimeError(name) from error

    config = EngineConfig(
        kv_blocks=runner.kv_blocks,
        block_tokens=runner.block_tokens,
        context_tokens=runner.config.context_tokens,
        max_sequences=batch,
        waiting_tokens_max=1 << 30,
        version=VERSION,
        boot_id="boot",
    )
    return Stepper(
        runner=runner,
        vocab_size=text.vocab_size,
        config=config,
        on_end=lambda _: None,
        sink_error=sink_error,
    )


def a_live(text: TextRules, prompt: list[int], number: int, max_tokens: int) -> Live:
    request = Generate(
        request_id=f"req_{time.perf_counter_ns()}",
        attempt=1,
        version=VERSION,
        prompt_ids=tuple(prompt),
        choices=(Choice(index=0),),
        sampling=Sampling(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        tenant_salt=b"",
    )
    generation = open_generation(
        request,
        text,
        context_tokens=text.context_tokens,
        numbers=itertools.count(number),
        arrived_ms=0.0,
    )
    return Live(generation, lambda _: None)


def table(told: dict[str, dict[str, float]]) -> str:
    names = dict.fromkeys(itertools.chain.from_iterable(told.values()))
    lines = ["ms".ljust(18) + "".join(column.rjust(19) for column in told)]
    lines += [
        name.ljust(18) + "".join(f"{figures.get(name, 0):19.2f}" for figures in told.values())
        for name in sorted(names, key=lambda name: -max(t.get(name, 0) for t in told.values()))
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
