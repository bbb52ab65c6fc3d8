"""Tiny models to pull, and stores to pull them into."""

from pathlib import Path

import pytest

from artifacts.store import ModelStore
from tests.support.small_model import small_model_store
from tests.support.tiny_llama import TinyLlama, write_hf


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "Tiny Model", TinyLlama(layers=1))


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return small_model_store(tmp_path_factory.getbasetemp() / "small-model")
