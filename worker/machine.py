"""What this process may use of its machine: memory and processors, by every bound that holds.

A container's limits are the kernel's to enforce: by killing whoever goes over them, or by
making threads beyond the quota wait. Nothing here fails: a file that is missing or strange is
a bound that does not hold.
"""

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from worker.memory import Bound, megabytes

_KIB = 1024
# A cgroup without a limit says so with a word (v2), or with a number beyond any machine (v1).
_NO_LIMIT = 1 << 60


class Memory(Protocol):
    """Where a model and its KV pool live."""

    def bounds(self) -> tuple[Bound, ...]:
        """What holds now; at least one."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Do `work`; bytes that it took at its height, beyond what is still used after it."""


class HostMemory:
    """The machine's own. `root` is where the kernel's files are, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def bounds(self) -> tuple[Bound, ...]:
        """See `Memory`."""
        available = _fields(self._root / "proc/meminfo").get("MemAvailable", 0) * _KIB
        return (
            Bound(name=f"{megabytes(available)} available on this machine", free=available),
            *self._cgroup_bounds(),
            *self._rlimit_bounds(),
        )

    def peak_of(self, work: Callable[[], None]) -> int:
        """See `Memory`. Where the kernel's high-water mark cannot be reset, it is older: more."""
        with contextlib.suppress(OSError):
            (self._root / "proc/self/clear_refs").write_text("5")
        work()
        status = _fields(self._root / "proc/self/status")
        return max(0, status.get("VmHWM", 0) - status.get("VmRSS", 0)) * _KIB

    def _cgroup_bounds(self) -> Iterator[Bound]:
        for folder in _cgroup_folders(self._root, "memory"):
            for names in (("memory.max", "memory.current"), _V1_MEMORY):
                limit, used = (_number(folder / name) for name in names)
                if limit is None or used is None or limit >= _NO_LIMIT:
                    continue
                # Pages of files that nobody has used lately are given back when memory is short.
                used -= min(used, _reclaimable(folder))
                name = f"cgroup limit {megabytes(limit)}, {megabytes(used)} of it in use"
                yield Bound(name=name, free=max(0, limit - used))

    def _rlimit_bounds(self) -> Iterator[Bound]:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            used = _fields(self._root / "proc/self/status").get("VmSize", 0) * _KIB
            name = f"address space limit {megabytes(limit)}, {megabytes(used)} of it in use"
            yield Bound(name=name, free=max(0, limit - used))


class CUDAMemory:
    """One GPU's. `cuda` is `torch.cuda`, with the device chosen."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def bounds(self) -> tuple[Bound, ...]:
        """See `Memory`. What torch keeps for itself counts as used until it is given back."""
        self._cuda.empty_cache()
        free, total = self._cuda.mem_get_info()
        return (Bound(name=f"of {megabytes(total)} on this GPU", free=free),)

    def peak_of(self, work: Callable[[], None]) -> int:
        """See `Memory`. What other processes take meanwhile is not this one's peak."""
        self._cuda.reset_peak_memory_stats()
        work()
        self._cuda.synchronize()
        peak: int = self._cuda.max_memory_reserved()
        self._cuda.empty_cache()
        return max(0, peak - int(self._cuda.memory_reserved()))


def cores(root: Path = Path("/"), allowed: int | None = None) -> int:
    """Processors that this process may use: by affinity, or by a cgroup's quota if that is less.

    More threads than that only wait for each other. `allowed` is for tests.
    """
    found = allowed or len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _quota(folder)
        if quota is not None:
            found = min(found, max(1, math.ceil(quota)))
    return found


def process_age_s(root: Path = Path("/")) -> float:
    """Since the kernel started this process: imports are a part of a cold start. 0: unknown."""
    after_name = _text(root / "proc/self/stat").rpartition(")")[2].split()
    uptime = _text(root / "proc/uptime").split()
    try:
        # The 22nd field; the first two end with the name's bracket.
        started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(uptime[0]) - started_s)
    except (IndexError, ValueError):
        return 0.0


def trim() -> None:
    """Have the allocator return what is free in the middle of its heap. Only glibc's can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _quota(folder: Path) -> float | None:
    """Processors, as a cgroup allows them: v2's one file, or v1's two."""
    words = _text(folder / "cpu.max").split()
    if not words:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [_text(folder / name).strip() for name in names]
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[1] == "0":  # noqa: PLR2004 - quota and period
        return None
    return int(words[0]) / int(words[1])


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup for `controller` and those around it: each may have its own limit.

    In a container the path is often that of the host, and the limits lie at the mount itself.
    """
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        inner = top / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _reclaimable(folder: Path) -> int:
    stat = _fields(folder / "memory.stat")
    return stat.get("total_inactive_file", stat.get("inactive_file", 0))


def _fields(path: Path) -> dict[str, int]:
    """`name number` or `name: number kB` a line, as the kernel writes them."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
