"""Every bound on memory and processors that holds, from kernels' files as they are written."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from worker.machine import CUDAMemory, HostMemory, cores

MIB = 1024 * 1024
MEMINFO = "MemTotal:       24683868 kB\nMemAvailable:    2097152 kB\n"
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def frees(root):
    return [bound.free // MIB for bound in HostMemory(root).bounds()]


def test_without_a_cgroup_the_machine_decides(root):
    assert frees(root) == [2048]
    write(root, "proc/self/cgroup", "0::/\n")
    assert frees(root) == [2048]


def test_a_v2_limit_counts_less_what_is_used_and_not_reclaimable(root):
    write(root, "proc/self/cgroup", "0::/pod/worker\n")
    folder = "sys/fs/cgroup/pod/worker/"
    write(root, folder + "memory.max", f"{512 * MIB}\n")
    write(root, folder + "memory.current", f"{200 * MIB}\n")
    write(root, folder + "memory.stat", f"anon 1\ninactive_file {50 * MIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/memory.current", "1\n")
    assert frees(root) == [2048, 362]
    assert HostMemory(root).bounds()[1].name == "cgroup limit 512 MiB, 150 MiB of it in use"


def test_a_limit_further_up_holds_too(root):
    write(root, "proc/self/cgroup", "0::/pod/worker\n")
    write(root, "sys/fs/cgroup/pod/worker/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{100 * MIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{300 * MIB}\n")
    assert frees(root) == [2048, 0]


def test_a_v1_limit_is_found_in_its_controller(root):
    write(root, "proc/self/cgroup", "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n0::/\n")
    for folder, limit in (("docker/a", str(300 * MIB)), ("", UNLIMITED_V1)):
        write(root, f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        write(root, f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", str(100 * MIB))
    write(
        root,
        "sys/fs/cgroup/memory/docker/a/memory.stat",
        f"inactive_file 0\ntotal_inactive_file {20 * MIB}\n",
    )
    assert frees(root) == [2048, 220]


def test_in_a_container_the_limit_lies_at_the_mount_whatever_the_path_says(root):
    write(root, "proc/self/cgroup", "0::/somewhere/on/the/host\n")
    write(root, "sys/fs/cgroup/memory.max", f"{64 * MIB}\n")
    write(root, "sys/fs/cgroup/memory.current", "0\n")
    assert frees(root) == [2048, 64]


def test_strange_files_bound_nothing(root):
    write(root, "proc/self/cgroup", "nonsense\n0::/x\n")
    write(root, "sys/fs/cgroup/x/memory.max", "lots\n")
    write(root, "sys/fs/cgroup/x/memory.current", "")
    write(root, "sys/fs/cgroup/x/cpu.max", "1 2 3\n")
    assert frees(root) == [2048]
    assert cores(root, allowed=3) == 3


@pytest.mark.parametrize(
    ("text", "threads"),
    [("max 100000\n", 64), ("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1)],
)
def test_threads_are_what_a_quota_allows(root, text, threads):
    # vllm 32651: more threads than the container's processors.
    write(root, "proc/self/cgroup", "0::/w\n")
    write(root, "sys/fs/cgroup/w/cpu.max", text)
    assert cores(root, allowed=64) == threads


def test_a_v1_quota_counts_and_none_is_minus_one(root):
    write(root, "proc/self/cgroup", "1:cpu:/w\n")
    write(root, "sys/fs/cgroup/cpu/w/cpu.cfs_quota_us", "300000\n")
    write(root, "sys/fs/cgroup/cpu/w/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cores(root, allowed=64) == 3


def test_threads_follow_the_affinity_of_this_process():
    assert cores(Path("/nowhere")) == len(os.sched_getaffinity(0))


def test_an_address_space_limit_is_a_bound():
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    try:
        bound = HostMemory().bounds()[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    assert bound.name.startswith("address space limit 1048576 MiB")
    assert 0 < bound.free < 1 << 40


def test_a_peak_is_what_was_taken_and_given_back():
    # In a process of its own: this one's heap has holes that the work would fit into.
    script = (
        "from worker.machine import HostMemory\n"
        "work = lambda: bytearray(b'1' * (64 << 20)) and None\n"
        "print(HostMemory().peak_of(work) >> 20)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 64 <= int(ran.stdout) < 300


class FakeCUDA:
    """`torch.cuda` of a GPU of 80 GiB, with numbers for memory."""

    def __init__(self):
        self.reserved, self.others, self.peak = 20 << 30, 4 << 30, 0

    def empty_cache(self):
        self.reserved = min(self.reserved, 16 << 30)

    def mem_get_info(self):
        return (80 << 30) - self.reserved - self.others, 80 << 30

    def reset_peak_memory_stats(self):
        self.peak = self.reserved

    def max_memory_reserved(self):
        return self.peak

    def memory_reserved(self):
        return self.reserved

    def synchronize(self):
        pass

    def work(self):
        self.reserved += 8 << 30
        self.peak = max(self.peak, self.reserved)


def test_a_gpu_is_measured_by_the_same_two_questions():
    cuda = FakeCUDA()
    memory = CUDAMemory(cuda)
    [bound] = memory.bounds()
    assert bound.free == 60 << 30
    assert bound.name == "of 81920 MiB on this GPU"
    assert memory.peak_of(cuda.work) == 8 << 30
