"""One stack for all end-to-end tests: two gateways, two workers, the real small model."""

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"), gateways=2, workers=2)
    running.up(environ={"HEADWORKS_THREADS": "1"})
    yield running
    running.down()
