"""One stack for all end-to-end tests: two gateways, two workers, the real small model."""

from collections.abc import Iterator

import anthropic
import openai
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


@pytest.fixture
def openai_client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.key) as client:
        yield client


@pytest.fixture
def anthropic_client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.gateway_url, api_key=stack.key) as client:
        yield client
