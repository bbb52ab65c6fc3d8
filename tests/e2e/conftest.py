"""One stack for all end-to-end tests: two gateways, two workers, the real small model."""

from collections.abc import Iterator

import pytest

from tests.support.services import open_directory
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with open_directory("stack") as data:
        running = Stack(data, gateways=2, workers=2)
        running.up(environ={"HEADWORKS_THREADS": "1"})
        yield running
        running.down()
