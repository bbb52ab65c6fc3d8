"""Penalties, biases, bans and prompt logprobs from the real SDK to the worker and back."""

import asyncio
from typing import Any

import openai
import pytest

from core.money import EndCause
from core.protocol import Failed, Prompted
from tests.support.gateway_requests import CHAT, COMPLETIONS, MESSAGES, error_of, post
from tests.support.gateway_world import MODEL, Caller, World
from tests.support.openai_grammar import check_openai_completion_stream
from tests.support.scripted_worker import Run, answers, dies, produce, prompt_logprob, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]


def a_client(world: World, caller: Caller) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=caller.key, max_retries=0)


async def test_every_parameter_reaches_the_worker_from_both_interfaces(
    world: World, caller: Caller
) -> None:
    own: Any = {
        "frequency_penalty": 0.5,
        "presence_penalty": -1.5,
        "logit_bias": {"7": -100, "300": 2.5},
        "max_tokens": 9,
    }
    extensions = {
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "stop_token_ids": [9, 10],
        "allowed_token_ids": [7, 8, 9],
        "bad_words": ["world"],
        "top_k": 40,
        "ignore_eos": True,
        "prompt_logprobs": 2,
    }
    async with a_client(world, caller) as client:
        ask: Any = [{"role": "user", "content": "Hello"}]
        await client.chat.completions.create(
            model=MODEL, messages=ask, **own, extra_body=extensions
        )
        await client.completions.create(model=MODEL, prompt="Once", **own, extra_body=extensions)
    for message in world.worker.requests:
        asked = message.sampling
        assert (asked.frequency_penalty, asked.presence_penalty) == (0.5, -1.5)
        assert asked.logit_bias == ((7, -100.0), (300, 2.5))
        assert (asked.min_p, asked.repetition_penalty, asked.top_k) == (0.05, 1.2, 40)
        assert (asked.min_tokens, asked.max_tokens, asked.ignore_eos) == (3, 9, True)
        assert (asked.stop_ids, asked.allowed_ids) == ((9, 10), (7, 8, 9))
        assert asked.prompt_logprobs == 2
        assert len(asked.bad_words) == 2  # with a space before it, and without
    assert len(world.worker.requests) == 2


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_tokens": 51}, "min_tokens"),
        ({"min_p": 2}, "min_p"),
    ],
)
async def test_what_the_model_cannot_do_is_a_400_that_names_the_field(
    world: World, caller: Caller, asked: dict[str, Any], param: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        response = await post(world, caller, path, **asked)
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == param
    assert world.worker.requests == []


async def test_anthropics_interface_has_none_of_them(world: World, caller: Caller) -> None:
    for name in ("frequency_penalty", "min_p", "logit_bias", "prompt_logprobs"):
        assert (await post(world, caller, MESSAGES, **{name: 0})).status_code == 400


async def test_constraints_that_leave_nothing_are_the_callers_400_with_the_reason(
    world: World, caller: Caller
) -> None:
    async def contradicts(run: Run) -> None:
        await run.start()
        run.ended = True
        reason = "its constraints leave no token to choose from"
        await run.send(Failed(code="bad_request", message=reason, retryable=False, usage=run.usage))

    world.worker.default = contradicts
    response = await post(world, caller)
    # The engine had started, so the stream's status would have been sent; a whole answer's is not.
    assert response.status_code == 400, response.text
    assert "leave no token" in error_of(response)["message"]
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.FAILED
    assert len(world.worker.requests) == 1


async def test_an_echo_with_logprobs_through_the_sdk(world: World, caller: Caller) -> None:
    async with a_client(world, caller) as client:
        whole = await client.completions.create(
            model=MODEL, prompt="Once upon a time", echo=True, logprobs=2
        )
        plain = await client.completions.create(model=MODEL, prompt="Once upon a time", echo=True)
        by_ids = await client.completions.create(model=MODEL, prompt=[70, 80, 90], echo=True)
    prompt = world.worker.requests[0].prompt_ids
    choice, told = whole.choices[0], whole.choices[0].logprobs
    assert choice.text == "Once upon a time" + whole_text(5)
    assert told is not None
    assert told.token_logprobs is not None
    assert len(told.token_logprobs) == len(prompt) + 5
    assert told.token_logprobs[:3] == [None, -1.0, -1.0]
    assert "".join(told.tokens or [])[: len("Once upon a time")] == "Once upon a time"
    assert "prompt_logprobs" not in (choice.model_extra or {})
    assert plain.choices[0].text == "Once upon a time" + whole_text(5)
    assert plain.choices[0].logprobs is None
    assert world.worker.requests[1].sampling.prompt_logprobs is None
    assert by_ids.choices[0].text.endswith(whole_text(5))
    assert len(by_ids.choices[0].text) > len(whole_text(5))


async def test_a_streamed_echo_keeps_the_streams_grammar(world: World, caller: Caller) -> None:
    response = await post(world, caller, COMPLETIONS, echo=True, logprobs=1, n=2, stream=True)
    told = check_openai_completion_stream(response.content, include_usage=False, n=2)
    assert told.texts == ["Once upon a time" + whole_text(5, choice) for choice in range(2)]


async def test_prompt_logprobs_through_the_sdk(world: World, caller: Caller) -> None:
    async with a_client(world, caller) as client:
        ask: Any = [{"role": "user", "content": "Hello"}]
        chat = await client.chat.completions.create(
            model=MODEL, messages=ask, extra_body={"prompt_logprobs": 2}
        )
        text = await client.completions.create(
            model=MODEL, prompt=[70, 80, 90], extra_body={"prompt_logprobs": 0}
        )
    chat_told: Any = (chat.model_extra or {})["prompt_logprobs"]
    ids = world.worker.requests[0].prompt_ids
    assert chat_told[0] is None
    assert [next(iter(one)) for one in chat_told[1:]] == [str(id_) for id_ in ids[1:]]
    assert [one["rank"] for one in chat_told[1].values()] == [1, 2]
    text_told: Any = (text.choices[0].model_extra or {})["prompt_logprobs"]
    assert [list(one) for one in text_told[1:]] == [["80"], ["90"]]


async def test_a_replica_that_dies_in_the_middle_of_a_prompt_is_made_up_for(
    world: World, caller: Caller
) -> None:
    async def dies_early(run: Run) -> None:
        await run.start()
        await run.tell_prompt(upto=5)
        await asyncio.sleep(0.05)
        await dies(after=None)(run)  # type: ignore[operator]  # a behaviour that is a function

    world.worker.script = [dies_early]
    response = await post(world, caller, COMPLETIONS, prompt=list(range(70, 90)), prompt_logprobs=0)
    assert response.status_code == 200, response.text
    told = response.json()["choices"][0]["prompt_logprobs"]
    assert [list(one) for one in told[1:]] == [[str(id_)] for id_ in range(71, 90)]
    assert len(world.worker.requests) == 2


async def test_an_answer_resumed_elsewhere_has_its_prompts_logprobs_once(
    world: World, caller: Caller
) -> None:
    async def dies_late(run: Run) -> None:
        await run.start()
        await run.tell_prompt()
        await produce(run, 5, 0.0, 2)
        await asyncio.sleep(0.05)
        await dies(after=None)(run)  # type: ignore[operator]  # a behaviour that is a function

    world.worker.script = [dies_late]
    response = await post(world, caller, COMPLETIONS, prompt=[70, 80, 90, 95], prompt_logprobs=1)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["text"] == whole_text(5)
    assert len(choice["prompt_logprobs"]) == 4


async def test_logprobs_of_another_prompt_are_a_broken_worker(world: World, caller: Caller) -> None:
    async def tells_wrong(run: Run) -> None:
        await run.start()
        await run.send(Prompted(start=1, logprobs=(prompt_logprob(5, 0),)))
        await run.abort.wait()

    world.worker.script = [tells_wrong]
    world.worker.default = answers(5)
    response = await post(world, caller, COMPLETIONS, prompt=[70, 80, 90], prompt_logprobs=1)
    assert response.status_code == 200, response.text
    assert len(world.worker.requests) == 2
