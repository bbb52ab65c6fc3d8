"""What most tests of the real model share: one thread, and their module's checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.one_thread import one_thread
from tests.support.tiny_llama import write_hf


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """See `one_thread`."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module's own `TINY`, as Hugging Face's files."""
    return write_hf(tmp_path_factory.mktemp("tiny"), request.module.TINY)
