"""A worker that does not take what we send it: our fault, told at once and not tried around."""

import pytest

from core.money import EndCause
from tests.support.gateway_requests import error_of, post
from tests.support.gateway_world import Caller, World
from tests.support.scripted_worker import answers, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.mark.parametrize("status", [400, 401, 413])
async def test_a_refused_message_is_sent_once(world: World, caller: Caller, status: int) -> None:
    world.worker.script = [status]
    response = await post(world, caller)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert len(world.worker.requests) == 1
    (row,) = await world.settled(caller, 1)
    assert (row.cause, row.billed_micro) in [(EndCause.FAILED, 0), (EndCause.NOT_STARTED, 0)]
    await world.dispatcher_is_empty()


async def test_a_worker_out_of_order_is_tried_again(world: World, caller: Caller) -> None:
    world.worker.script = [503, answers(5)]
    response = await post(world, caller)
    assert response.json()["choices"][0]["message"]["content"] == whole_text(5)
    assert len(world.worker.requests) == 2
