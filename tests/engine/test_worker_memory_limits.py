"""The real process where memory is short: it says what does not fit, and ends."""

import pytest
import torch

from tests.support.tiny_llama import write_gguf, write_hf
from tests.support.worker_process import a_worker, tiny_store
from worker.memory import Bound, DoesNotFitError
from worker.settings import WorkerSettings
from worker.startup import load_model
from worker.weights import count_weights, load_weights

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


async def refused(root, version, **options):
    """The last words of a process that ended as one whose settings will not do."""
    async with a_worker(root, version, **options) as worker:
        assert await worker.end() == 2, worker.output
        assert "Traceback" not in worker.output
        return worker.output.splitlines()[-1]


async def test_blocks_beyond_all_memory_are_refused_with_the_sum(tmp_path):
    # vllm 10971, 15800: KV space over the machine's memory, and the kernel killed the process.
    [version] = tiny_store(tmp_path)
    told = await refused(tmp_path, version, kv_blocks=1 << 31)
    assert told.startswith("worker: a KV pool of 2147483648 blocks takes")
    for part in ("there is room for", "free (", "less", "grammar masks"):
        assert part in told
    assert told.endswith("Lower HEADWORKS_KV_BLOCKS, or give the worker more memory.")


async def test_a_pool_over_the_processes_own_limit_is_refused_and_names_that_limit(tmp_path):
    [version] = tiny_store(tmp_path)
    options = {"kv_blocks": 0, "kv_memory_mb": 8000, "address_space": 6000 * MIB}
    told = await refused(tmp_path, version, **options)
    assert "a KV pool of" in told
    assert "address space limit 6000 MiB" in told
    assert "Lower HEADWORKS_KV_MEMORY_MB" in told


class Cramped:
    """Memory of half a megabyte."""

    def bounds(self):
        return (Bound(name="a small machine", free=MIB // 2),)

    def peak_of(self, work):
        raise AssertionError("nothing is to be loaded")


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path):
    [version] = tiny_store(tmp_path)
    settings = WorkerSettings(
        internal_secret="x" * 16,
        replica_id="r1",
        models_dir=tmp_path / "models",
        model_version=version,
        journal_dir=tmp_path,
        control_plane_url="http://127.0.0.1:9",
    )
    with pytest.raises(DoesNotFitError, match=r"the weights take 0\.53 MiB, .*a small machine"):
        load_model(settings, Cramped())


async def test_a_share_gives_a_pool_and_the_worker_is_ready(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version, kv_blocks=0, kv_memory_share=0.001) as worker:
        await worker.until_ready()
        assert (await worker.load())["kv_blocks_total"] > 512 // 16


@pytest.mark.parametrize("format_", ["hf", "gguf"])
def test_weights_are_counted_without_reading_them(tmp_path, format_):
    path = write_hf(tmp_path) if format_ == "hf" else write_gguf(tmp_path / "a.gguf", kind="Q8_0")
    loaded = load_weights(path, torch.float32)
    assert count_weights(path) == sum(tensor.numel() for tensor in loaded.tensors.values())
