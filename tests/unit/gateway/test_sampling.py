"""What a worker is asked to draw with: the client's word, else the model's own default."""

import msgspec
import pytest

from core.errors import Code, RefusedError
from core.protocol import Choice, Generate, Sampling
from gateway.conversation import Conversation
from gateway.openai.draws import BIASES_MAX, STOP_IDS_MAX
from gateway.relay.sampling import PROMPT_ENTRIES_MAX, sampling_of
from tests.support.tiny_llama import write_hf
from text.rules import TextRules
from text.sampling import SamplingDefaults
from worker.faults import IDS_MAX, STOPS_MAX, fault

DEFAULTS = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40)
SILENT = Conversation(dialect="openai", kind="text", model="m", prompt="Once")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> TextRules:
    return TextRules.load(write_hf(tmp_path_factory.mktemp("tiny")))


def sampling(rules: TextRules, defaults: SamplingDefaults = DEFAULTS, **said: object) -> Sampling:
    rules.sampling = defaults
    conversation = msgspec.structs.replace(SILENT, **said)
    return sampling_of(
        conversation, prompt_tokens=1000, max_tokens=5, rules=rules, new_seed=lambda: 77
    )


def test_what_the_client_leaves_out_is_the_models_own(rules: TextRules) -> None:
    asked = sampling(rules)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.2, 0.9, 40)
    assert (asked.seed, asked.max_tokens) == (77, 5)


def test_a_model_that_says_nothing_is_drawn_as_it_is(rules: TextRules) -> None:
    assert sampling(rules, SamplingDefaults()) == Sampling(
        seed=77, max_tokens=5, temperature=1.0, top_p=1.0, top_k=0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.5),
        ("repetition_penalty", 1.5),
        ("frequency_penalty", -1.0),
        ("presence_penalty", 2.0),
        ("logit_bias", ((5, 1.0),)),
        ("allowed_ids", (5, 6)),
        ("stop_ids", (5, 6)),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("logprobs", 2),
        ("prompt_logprobs", 2),
        ("stop", ("x",)),
    ],
)
def test_what_the_client_says_counts_alone_even_where_it_is_nothing(
    rules: TextRules, name: str, value: float
) -> None:
    asked = sampling(rules, **{name: value})
    assert asked == msgspec.structs.replace(sampling(rules), **{name: value})
    generate = Generate(
        request_id="r",
        attempt=1,
        version="v",
        prompt_ids=(1,),
        choices=(Choice(index=0),),
        sampling=asked,
        tenant_salt=b"",
    )
    assert fault(generate, rules) is None


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(rules: TextRules) -> None:
    found = sampling(rules, bad_words=("hello", " hello", "flow world")).bad_words
    texts = [rules.decode(ids) for ids in found]
    assert texts == ["hello", " hello", "flow world", " flow world"]
    assert any(len(ids) > 1 for ids in found)


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"min_tokens": 6}, "min_tokens"),
        ({"logit_bias": ((5, 1.0), (512, 1.0))}, "logit_bias"),
        ({"allowed_ids": (512,)}, "allowed_token_ids"),
        ({"stop_ids": (512,)}, "stop_token_ids"),
        ({"bad_words": ("  ",)}, "bad_words"),
        ({"bad_words": ("\ud800",)}, "bad_words"),
        ({"bad_words": ("xyzzy" * 20,)}, "bad_words"),
    ],
)
def test_what_the_model_cannot_do_is_refused_and_names_the_field(
    rules: TextRules, said: dict[str, object], param: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        sampling(rules, **said)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.param) == (Code.BAD_REQUEST, param)
    assert refusal.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True}, "logprobs"),
    ],
)
def test_more_than_can_be_held_of_a_prompt_is_refused(
    rules: TextRules, said: dict[str, object], param: str
) -> None:
    conversation = msgspec.structs.replace(SILENT, **said)
    asked = {"max_tokens": 5, "rules": rules, "new_seed": lambda: 77}
    most = PROMPT_ENTRIES_MAX // 21
    assert sampling_of(conversation, prompt_tokens=most, **asked).prompt_logprobs == 20
    with pytest.raises(RefusedError) as caught:
        sampling_of(conversation, prompt_tokens=most + 1, **asked)
    assert caught.value.refusal.param == param


def test_a_worker_takes_as_many_ids_as_a_caller_may_send() -> None:
    assert BIASES_MAX <= IDS_MAX
    assert STOP_IDS_MAX <= STOPS_MAX
