"""Strict tools where the model decides: what a grammar lets through fits, and free text is free."""

import functools
import tempfile
from pathlib import Path

import pytest

from core.errors import Code, RefusedError
from gateway.conversation import Conversation
from gateway.toolbox import Tool, Toolbox
from gateway.tools.cursor import Called
from gateway.tools.plan import plan
from gateway.tools.strict import held
from tests.support.dialect_events import a_conversation
from tests.support.tiny_llama import TinyLlama, write_hf
from text.grammar import Grammars
from text.rules import TextRules
from text.tool_format import ToolFormat

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F = Tool(name="f", parameters=SCHEMA, strict=True)
G = Tool(name="g", parameters=SCHEMA)
BOTH = Toolbox(tools=(F, G), callable=(F, G))
FITS = '{"name": "f", "arguments": {"x": 1}}'
FREE = '{"name":"g","arguments":{"z":[1]}}'
WRONG = '{"name": "f", "arguments": {"x": "a"}}'


@functools.cache
def rules() -> TextRules:
    return TextRules.load(write_hf(Path(tempfile.mkdtemp()), TinyLlama(layers=1)))


def a_strict(toolbox: Toolbox | None = BOTH) -> Conversation:
    return a_conversation(toolbox=toolbox)


def takes(tool_format: ToolFormat, text: str, toolbox: Toolbox = BOTH) -> bool:
    grammar = held(a_strict(toolbox), tool_format).grammar
    assert grammar is not None
    matcher = Grammars(rules()).compile(grammar).matcher()
    return matcher.consume_tokens(rules().plain_ids(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("tool_format", "text", "calls"),
    [
        *((form, text, []) for form in ("hermes", "llama", "mistral") for text in ("", "a <b>\n{")),
        ("hermes", "x <tool_", []),
        ("hermes", f"So.\n<tool_call>\n{FITS}\n</tool_call>", ["f"]),
        (
            "hermes",
            f"<tool_call>{FREE}</tool_call>\n<tool_call>\n{FITS}\n</tool_call> more",
            ["g", "f"],
        ),
        ("llama", FITS, ["f"]),
        ("llama", f"{FREE}; {FITS}", ["g", "f"]),
        ("llama", f"So. <|python_tag|>{FITS}", ["f"]),
        ("mistral", f"So.[TOOL_CALLS] [{FITS}]", ["f"]),
        ("mistral", f"[TOOL_CALLS][{FREE}, {FITS}]", ["g", "f"]),
    ],
)
def test_what_fits_is_taken_and_parsed(
    tool_format: ToolFormat, text: str, calls: list[str]
) -> None:
    assert takes(tool_format, text)
    reading = plan(BOTH, tool_format)
    assert reading is not None
    told = reading.parser().feed(text, final=True)
    assert [piece.name for piece in told if isinstance(piece, Called)] == calls


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", f"<tool_call>\n{WRONG}\n</tool_call>"),
        ("hermes", "<tool_call> so"),
        ("hermes", '<tool_call>{"name":"h","arguments":{}}</tool_call>'),
        ("hermes", f"<tool_call>{FITS}"),
        ("llama", WRONG),
        ("llama", '{"a": 1}'),
        ("llama", f"So. <|python_tag|>{WRONG}"),
        ("mistral", f"[TOOL_CALLS] [{WRONG}]"),
        ("mistral", '[TOOL_CALLS]f{"x": "a"}'),
    ],
)
def test_what_does_not_fit_is_not_taken(tool_format: ToolFormat, text: str) -> None:
    assert not takes(tool_format, text)


@pytest.mark.parametrize(
    ("tool_format", "one", "more"),
    [
        ("hermes", f"So. <tool_call>{FITS}</tool_call>", " <tool_call>"),
        ("llama", FITS, ";"),
        ("mistral", f"[TOOL_CALLS][{FITS}]", " "),
    ],
)
def test_one_call_is_all_where_it_is_the_most(tool_format: ToolFormat, one: str, more: str) -> None:
    once = Toolbox(tools=(F, G), callable=(F, G), parallel=False)
    assert takes(tool_format, one, once)
    assert takes(tool_format, "So.", once)
    grammar = held(a_strict(once), tool_format).grammar
    assert grammar is not None
    matcher = Grammars(rules()).compile(grammar).matcher()
    assert not matcher.consume_tokens(rules().plain_ids(one + more))


def test_nothing_is_held_that_was_not_promised() -> None:
    free = Toolbox(tools=(F, G), callable=(G,))
    forced = Toolbox(tools=(F,), callable=(F,), mode="required")
    for toolbox in (None, free, forced, Toolbox(tools=(F,), callable=(F,), mode="none")):
        conversation = a_strict(toolbox)
        assert held(conversation, "hermes") is conversation


def test_a_form_that_has_no_grammar_is_refused_by_name() -> None:
    with pytest.raises(RefusedError) as caught:
        held(a_strict(), "deepseek")
    assert (caught.value.refusal.code, caught.value.refusal.param) == (Code.UNSUPPORTED, "tools")


def test_a_refusal_names_the_tools() -> None:
    assert held(a_strict(), "hermes").grammar_param == "tools"
