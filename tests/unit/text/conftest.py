"""Tokenizers to test on: tiny ones made here, and the small real model's."""

from pathlib import Path

import pytest

from tests.support.small_model import small_model_directory
from tests.support.tiny_llama import TinyLlama, write_gguf, write_hf
from text.rules import TextRules


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny-hf"), TinyLlama(layers=1, vocab=700))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-gguf") / "tiny.gguf"
    return write_gguf(path, TinyLlama(layers=1, vocab=700)).parent


@pytest.fixture(scope="session")
def tiny_rules(tiny_hf: Path) -> TextRules:
    return TextRules.load(tiny_hf)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model_directory(tmp_path_factory.getbasetemp() / "small-model")


@pytest.fixture(scope="session")
def small_rules(small_model: Path) -> TextRules:
    return TextRules.load(small_model)
