"""Grammars compiled before a request costs anything: what is remembered, and what is refused."""

import threading

import anyio
import pytest

from core.errors import Code, RefusedError
from core.protocol import Grammar
from gateway import grammars as module
from gateway.grammars import GrammarChecks, GrammarLimits
from tests.support.engine_requests import FakeText

pytestmark = pytest.mark.anyio
GOOD = Grammar(kind="regex", text="a+")
BAD = Grammar(kind="regex", text="(")


class FakePrompts:
    """Text rules by version."""

    def __init__(self):
        self.asked = []
        self.text = {version: FakeText() for version in ("v1", "v2", "v3")}

    async def rules(self, version):
        self.asked.append(version)
        return self.text[version]


async def refusal(checks, *args):
    with pytest.raises(RefusedError) as raised:
        await checks.check(*args)
    return raised.value.refusal


async def test_a_grammar_that_compiles_passes_and_is_remembered():
    prompts = FakePrompts()
    checks = GrammarChecks(prompts)
    for _ in range(3):
        await checks.check("v1", GOOD, "guided_regex")
    assert prompts.asked == ["v1"]
    checks.close()


async def test_one_that_does_not_is_refused_by_the_name_of_its_field():
    prompts = FakePrompts()
    checks = GrammarChecks(prompts)
    for param in ("guided_regex", "structured_outputs.regex"):
        refused = await refusal(checks, "v1", BAD, param)
        assert (refused.code, refused.param) == (Code.BAD_REQUEST, param)
        assert refused.message.startswith(f"{param}: invalid regex")
        assert "unclosed group" in refused.message
    assert prompts.asked == ["v1"]
    checks.close()


async def test_each_version_judges_for_itself_and_few_are_kept():
    prompts = FakePrompts()
    checks = GrammarChecks(prompts, GrammarLimits(versions_max=2, remembered_max=2))
    for version in ("v1", "v2", "v3"):
        await checks.check(version, GOOD, "guided_regex")
    assert list(checks._versions) == ["v2", "v3"]
    await checks.check("v1", GOOD, "guided_regex")
    assert prompts.asked == ["v1", "v2", "v3", "v1"]
    assert len(checks._faults) == 2
    # The version's files were read again: its vocabulary is another object.
    prompts.text["v1"] = FakeText()
    await refusal(checks, "v1", BAD, "p")
    assert checks._versions["v1"].vocabulary is prompts.text["v1"]
    checks.close()


async def test_too_many_that_wait_are_refused_as_ours(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(module, "_compile", lambda *_: gate.wait(10) and None)
    checks = GrammarChecks(FakePrompts(), GrammarLimits(waiting_max=2))
    async with anyio.create_task_group() as group:
        for count in range(2):
            group.start_soon(checks.check, "v1", Grammar(kind="regex", text=f"{count}"), "p")
        await anyio.sleep(0.01)
        refused = await refusal(checks, "v1", GOOD, "p")
        gate.set()
    assert refused.code is Code.OVERLOADED
    checks.close()
