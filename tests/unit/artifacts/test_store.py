"""A store gives out only versions whose every byte is what was recorded."""

import os
from pathlib import Path

import msgspec
import pytest

from artifacts.errors import CorruptError, UnknownModelError
from artifacts.manifest import MANIFEST_NAME, Manifest
from artifacts.pull import pull
from artifacts.store import ModelStore


@pytest.fixture
def pulled(store: ModelStore, hf_directory: Path) -> Manifest:
    return pull(str(hf_directory), store)


def blob(store: ModelStore, manifest: Manifest, name: str) -> Path:
    entry = next(entry for entry in manifest.files if entry.path == name)
    return store.blobs / entry.sha256


def flip_a_byte(path: Path, *, keep_time: bool = False) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)
        file.seek(stat.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_version_is_found_by_its_name_and_by_its_hash(store, pulled):
    assert store.find("tiny-model") == pulled
    assert store.find(pulled.version) == pulled
    assert store.versions() == [pulled]


@pytest.mark.parametrize("name", ["", "other", "..", "../names/tiny-model", "/", "0" * 64])
def test_what_is_not_there_is_not_found(store, pulled, name):
    assert store.find(name) is None
    with pytest.raises(UnknownModelError, match="holds no model version"):
        store.directory(name)


def test_an_empty_store_holds_nothing(tmp_path):
    store = ModelStore(tmp_path / "nowhere")
    assert store.versions() == []
    assert store.find("x") is None


def test_the_directory_holds_every_file(store, pulled, hf_directory):
    directory = store.directory(pulled.version)
    for entry in pulled.files:
        assert (directory / entry.path).read_bytes() == (hf_directory / entry.path).read_bytes()
    assert {path.name for path in directory.iterdir()} == {
        MANIFEST_NAME,
        *(entry.path for entry in pulled.files),
    }


def test_a_store_may_be_moved(store, pulled, tmp_path):
    store.root.rename(tmp_path / "moved")
    directory = ModelStore(tmp_path / "moved").directory(pulled.version)
    assert (directory / "config.json").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_changed_byte_is_refused_by_the_files_name(store, pulled, name):
    store.directory(pulled.version)
    flip_a_byte(blob(store, pulled, name))
    with pytest.raises(CorruptError, match=rf"{name} is corrupt"):
        store.directory(pulled.version)
    with pytest.raises(CorruptError, match=rf"{name} is corrupt"):
        ModelStore(store.root).directory(pulled.version)


def test_a_file_never_checked_is_read_whole(store, pulled):
    flip_a_byte(blob(store, pulled, "model.safetensors"), keep_time=True)
    with pytest.raises(CorruptError, match=r"model.safetensors is corrupt"):
        store.directory(pulled.version)


def test_a_cut_file_is_refused(store, pulled):
    path = blob(store, pulled, "model.safetensors")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CorruptError, match=r"model.safetensors is corrupt"):
        store.directory(pulled.version)


def test_a_missing_blob_is_refused(store, pulled):
    blob(store, pulled, "config.json").unlink()
    with pytest.raises(CorruptError, match=r"config.json cannot be read"):
        store.directory(pulled.version)


def test_a_manifest_changed_by_hand_is_refused(store, pulled):
    path = store.root / "versions" / pulled.version / MANIFEST_NAME
    changed = msgspec.structs.replace(pulled, context_tokens=9_999)
    path.write_bytes(msgspec.json.encode(changed))
    with pytest.raises(CorruptError, match="does not match"):
        store.directory(pulled.version)


@pytest.mark.parametrize("body", [b"", b"{", b"{}"])
def test_a_version_without_a_whole_manifest_is_not_there_and_can_be_pulled_again(
    store, pulled, hf_directory, body
):
    (store.root / "versions" / pulled.version / MANIFEST_NAME).write_bytes(body)
    assert store.versions() == []
    assert store.find("tiny-model") is None
    assert pull(str(hf_directory), store).version == pulled.version
    assert store.directory(pulled.version).is_dir()


def test_a_second_process_trusts_the_stamps_of_the_first(store, pulled):
    store.directory(pulled.version)
    path = blob(store, pulled, "config.json")
    flip_a_byte(path, keep_time=True)
    # Same size, time and inode: the price of not reading gigabytes at every start.
    assert ModelStore(store.root).directory(pulled.version).is_dir()
    os.utime(path)
    with pytest.raises(CorruptError, match=r"config.json is corrupt"):
        ModelStore(store.root).directory(pulled.version)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"config.json": [0, 0, 0]}'])
def test_broken_stamps_mean_reading_again(store, pulled, damage):
    store.directory(pulled.version)
    (store.root / "stamps" / f"{pulled.version}.json").write_bytes(damage)
    assert ModelStore(store.root).directory(pulled.version).is_dir()


def test_a_store_without_a_place_for_stamps_still_reads(store, pulled):
    (store.root / "stamps").rmdir()
    assert store.directory(pulled.version).is_dir()


def test_one_content_under_two_names_is_one_version(store, pulled, hf_directory):
    again = pull(str(hf_directory), store, name="alias")
    assert again.version == pulled.version
    assert store.find("alias").version == pulled.version
    assert len(store.versions()) == 1


def test_a_name_means_the_latest_pull(store, pulled, hf_directory):
    (hf_directory / "chat_template.jinja").write_text("{{ messages }}")
    newer = pull(str(hf_directory), store)
    assert newer.version != pulled.version
    assert store.find("tiny-model") == newer
    assert store.find(pulled.version) == pulled
    assert {manifest.version for manifest in store.versions()} == {newer.version, pulled.version}
