"""What a scrape says: of an engine under load, at rest, and of engines before it."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.protocol import Choice, Finished, Grammar, Tokens
from tests.support.engine_requests import a_request
from tests.support.worker_process import a_worker, tiny_store

pytestmark = pytest.mark.anyio

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


async def scraped(worker):
    text = (await worker.client.get("/metrics")).text
    return {
        (sample.name.removeprefix("headworks_worker_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def blocks(now, kind="kv_blocks"):
    return sum(now[kind, state] for state in ("free", "cached", "in_use"))


async def test_a_scrape_under_load_adds_up_and_counts_what_was_told(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version, host_memory_mb=1) as worker:
        await worker.until_ready()
        requests = [
            a_request(
                range(10, 30 + n),
                version=version,
                max_tokens=60,
                ignore_eos=True,
                choices=(Choice(index=0), Choice(index=1)),
            )
            for n in range(12)
        ]
        asked = [asyncio.create_task(worker.generate(request)) for request in requests]
        seen = []
        while not all(task.done() for task in asked):
            seen.append(await scraped(worker))
            assert blocks(seen[-1]) == 64
        assert any(now["sequences", "running"] for now in seen)
        assert any(now["kv_blocks", "in_use"] for now in seen)
        for name in ("steps_total", "computed_tokens_total", "step_tokens_sum"):
            values = [now[(name,)] for now in seen]
            assert values == sorted(values)
        answers = [frames for frames in await asyncio.gather(*asked) if len(frames) > 1]
        lasts = [frames[-1] for frames in answers]
        assert all(isinstance(last, Finished) for last in lasts)
        now = await scraped(worker)
        produced = sum(len(f.ids) for frames in answers for f in frames if isinstance(f, Tokens))
        choices = 2 * len(answers)
        assert now["output_tokens_total",] == produced
        assert now["prompt_tokens_total",] == sum(last.usage.prompt_tokens for last in lasts)
        assert now["cached_tokens_total",] == sum(last.usage.cached_tokens for last in lasts) > 0
        assert now["attempts_total", "complete"] == len(answers)
        assert now["first_token_seconds_count",] == len(answers)
        assert now["inter_token_seconds_count",] == produced - choices
        for phase in ("queue", "prefill", "decode"):
            told_s = sum(getattr(last.timings, f"{phase}_ms") for last in lasts) / 1000
            assert now["phase_seconds_count", phase] == len(answers)
            assert now["phase_seconds_sum", phase] == pytest.approx(told_s)
        steps = now["step_seconds_count", "prefill"] + now["step_seconds_count", "decode"]
        assert steps == now["steps_total",] == now["step_tokens_count",]
        assert now["step_tokens_sum",] == now["computed_tokens_total",]
        assert (now["kv_blocks", "in_use"], now["sequences", "running"]) == (0, 0)
        assert blocks(now, "host_kv_blocks") > 0


async def test_grammars_sleeps_and_sums_over_engines_are_counted(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version) as worker:
        await worker.until_ready()
        for text in ("[a-z]{2,8}", "(((("):
            grammar = Grammar(kind="regex", text=text)
            await worker.generate(a_request(version=version, grammar=grammar))
        now = await scraped(worker)
        assert now["grammar_seconds_count", "compiled"] == 1
        assert now["grammar_seconds_count", "refused"] >= 1
        assert now["state", "ready"] == 1
        before = now["steps_total",]
        assert before > 0
        await worker.post("/sleep", {"level": 2})
        asleep = await scraped(worker)
        assert (asleep["state", "asleep"], asleep["steps_total",]) == (1, before)
        assert blocks(asleep) == 0
        await worker.post("/wake")
        await worker.generate(a_request(version=version))
        awake = await scraped(worker)
        assert awake["steps_total",] > before
        assert (awake["changes_total", "sleep"], awake["changes_total", "wake"]) == (1, 1)


async def test_every_metric_is_in_the_operators_table_and_follows_the_conventions(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version) as worker:
        await worker.until_ready()
        text = (await worker.client.get("/metrics")).text
    documented = OPERATIONS.read_text()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    ours = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    assert len(ours) > 20
    for name, kind in ours.items():
        assert name.startswith("headworks_worker_")
        assert name.endswith("_total") == (kind == "counter"), name
        assert f"`{name.removeprefix('headworks_worker_')}" in documented, name
