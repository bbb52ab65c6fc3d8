"""What a worker is asked to draw with: the client's word, else the model's own default."""

import msgspec
import pytest

from core.protocol import Sampling
from gateway.conversation import Conversation
from gateway.relay.exchange import _sampling
from text.sampling import SamplingDefaults

DEFAULTS = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40)
SILENT = Conversation(dialect="openai", kind="text", model="m", prompt="Once")


def sampling(defaults: SamplingDefaults = DEFAULTS, **said: object) -> Sampling:
    conversation = msgspec.structs.replace(SILENT, **said)
    return _sampling(conversation, 5, defaults, lambda: 77)


def test_what_the_client_leaves_out_is_the_models_own() -> None:
    asked = sampling()
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.2, 0.9, 40)
    assert (asked.seed, asked.max_tokens) == (77, 5)


def test_a_model_that_says_nothing_is_drawn_as_it_is() -> None:
    assert sampling(SamplingDefaults()) == Sampling(
        seed=77, max_tokens=5, temperature=1.0, top_p=1.0, top_k=0
    )


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("top_p", 1.0), ("top_k", 0)])
def test_what_the_client_says_counts_alone_even_where_it_is_nothing(
    name: str, value: float
) -> None:
    asked = sampling(**{name: value})
    assert asked == msgspec.structs.replace(sampling(), **{name: value})
