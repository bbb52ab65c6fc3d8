"""Judges on a real gateway: served models, asked as requests of the tenant's own."""

import asyncio

import pytest

from core.safety.policy import Judge
from tests.gateway.test_safety import a_caller, a_rule, hits_of, streamed_text
from tests.support.gateway_requests import CHAT, MESSAGES, error_of, post, text_of
from tests.support.gateway_world import MODEL
from tests.support.scripted_worker import answers, says

pytestmark = [pytest.mark.services, pytest.mark.anyio]


def a_judge(*, every_chars=0, model=MODEL, timeout_ms=5_000, **fields):
    detector = Judge(
        model=model, question="Is it rude?", every_chars=every_chars, timeout_ms=timeout_ms
    )
    return a_rule(**{"name": "rude", "detector": detector, "action": "block"} | fields)


async def test_a_judge_refuses_a_request_and_is_metered_as_one_of_the_tenants(world):
    caller = await a_caller(world, a_judge(stages=("input",)))
    world.worker.script = [says("yes")]
    response = await post(world, caller)
    assert response.status_code == 400
    assert error_of(response)["code"] == "content_filter"
    (judged,) = await world.settled(caller, 1)
    assert judged.endpoint == "safety_judge"
    assert judged.billed_micro > 0
    assert world.worker.requests[-1].sampling.grammar is not None
    (hit,) = await hits_of(world, caller, 1)
    assert (hit.rule, hit.stage, hit.text) == ("rude", "input", None)
    await world.dispatcher_is_empty()


async def test_a_judge_that_says_no_lets_the_request_through(world):
    caller = await a_caller(world, a_judge(stages=("input",)))
    world.worker.script = [says("no"), says("Hello.")]
    assert text_of(CHAT, await post(world, caller)) == "Hello."
    rows = await world.settled(caller, 2)
    assert sorted(row.endpoint for row in rows) == ["chat_completions", "safety_judge"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_nothing_is_told_that_a_judge_of_the_output_has_not_seen(world, path):
    caller = await a_caller(world, a_judge())
    world.worker.script = [says("You ", "fool."), says("yes")]
    response = await post(world, caller, path, stream=True)
    assert streamed_text(path, response) == ""
    assert "content_filter" in response.text or '"stop_reason":"refusal"' in response.text
    rows = await world.settled(caller, 2)
    assert {row.cause for row in rows if row.endpoint != "safety_judge"} == {"filtered"}
    await world.dispatcher_is_empty()


async def test_a_judge_is_asked_for_every_stretch_and_ends_the_answer_where_it_says_so(world):
    caller = await a_caller(world, a_judge(every_chars=8, action="end"))
    world.worker.default = says("yes")

    async def main(run):
        await says(*["Good. "] * 2, *["Bad. "] * 200)(run)

    world.worker.script = [main, says("no")]
    response = await post(world, caller, stream=True, max_tokens=400)
    assert "Good. Good. " in streamed_text(CHAT, response)
    assert '"finish_reason":"content_filter"' in response.text


async def test_a_judge_that_only_logs_holds_nothing_back(world):
    caller = await a_caller(world, a_judge(action="log"))
    world.worker.script = [says("You ", "fool."), says("yes")]
    response = await post(world, caller, stream=True)
    assert streamed_text(CHAT, response) == "You fool."
    assert '"finish_reason":"stop"' in response.text
    (hit,) = await hits_of(world, caller, 1)
    assert (hit.action, hit.chars) == ("log", len("You fool."))


@pytest.mark.parametrize(("on_fault", "status"), [("closed", 503), ("open", 200)])
async def test_without_a_verdict_a_request_fares_as_its_policy_says(world, on_fault, status):
    caller = await a_caller(world, a_judge(stages=("input",), on_fault=on_fault))
    world.worker.script = [says("per", "haps")]
    assert (await post(world, caller)).status_code == status
    slow = await a_caller(world, a_judge(stages=("input",), on_fault=on_fault, timeout_ms=100))
    world.worker.script = [answers(5, delay_s=1.0)]
    assert (await post(world, slow)).status_code == status
    gone = await a_caller(world, a_judge(stages=("input",), on_fault=on_fault, model="nobody"))
    assert (await post(world, gone)).status_code == status
    await world.dispatcher_is_empty()


async def test_a_judge_whose_asker_leaves_is_ended_and_settled(world):
    caller = await a_caller(world, a_judge(stages=("input",)))
    world.worker.arrived.clear()
    world.worker.script = [answers(50, gap_s=0.2)]
    asking = asyncio.create_task(post(world, caller))
    await world.worker.arrived.wait()
    asking.cancel()
    (row,) = await world.settled(caller, 1)
    assert (row.endpoint, row.cause) == ("safety_judge", "client_cancelled")
    assert world.worker.aborts
    await world.dispatcher_is_empty()


@pytest.mark.parametrize(("on_fault", "told"), [("closed", ""), ("open", "Hello.")])
async def test_without_a_verdict_an_answer_fares_as_its_policy_says(world, on_fault, told):
    caller = await a_caller(world, a_judge(on_fault=on_fault))
    world.worker.script = [says("Hello."), says("perhaps")]
    assert text_of(CHAT, await post(world, caller)) == told
