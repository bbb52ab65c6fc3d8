"""Tools in prompts: in the template's own words or in ours, and never as control tokens."""

import datetime as dt
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_llama import CHATML, CONTROL, TinyLlama, write_hf
from tests.support.tool_templates import DEEPSEEK, FAMILIES, HERMES, LLAMA, MISTRAL
from text.chat import Chat, ChatCall, ChatMessage, ChatTool, TemplateRefusedError, TextRefusedError
from text.control import ControlToken
from text.hf_tokenizer import read_hf
from text.rules import TextRules
from text.template import CallStyle, ChatTemplate
from text.tool_format import tool_format
from text.tool_style import ToolStyle, tool_style

DAY = dt.date(2026, 3, 9)
NO_SYSTEM = CHATML.replace(
    "{{ '<|im_start|>' + m",
    "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ '<|im_start|>' + m",
    1,
)
WEATHER = ChatTool(
    "weather", "Tells the weather.", {"type": "object", "properties": {"at": {"type": "string"}}}
)
CALL = ChatCall("weather", {"at": "Zürich"}, "call00001")
OTHER = ChatCall("weather", {"at": "Bern"}, "call00002")
RESULT = ChatMessage("tool", "rain", name="weather", call_id="call00001")
OTHER_RESULT = ChatMessage("tool", "sun", name="weather", call_id="call00002")
ASK = ChatMessage("user", "Weather?")
ONCE = (ASK, ChatMessage("assistant", "", (CALL,)), RESULT)


def with_template(directory, template: str | None) -> TextRules:
    return TextRules(msgspec.structs.replace(read_hf(directory), template=template))


def written(rules: TextRules, *messages: ChatMessage, tools=(WEATHER,)) -> str:
    """The prompt with its control tokens shown, which every one of these texts is made of."""
    ids = rules.prompt(Chat(messages, tuple(tools)), day=DAY).ids
    return "".join(CONTROL[i] if i <= 2 else rules.token_bytes(i).decode("latin1") for i in ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_of_a_family_is_known_by_its_marks(tiny_hf, name):
    assert with_template(tiny_hf, FAMILIES[name]).tool_format == name


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, None])
def test_a_template_without_tools_gets_hermes_form(tiny_hf, template):
    assert with_template(tiny_hf, template).tool_format == "hermes"


def test_a_template_with_tools_and_no_known_mark_is_read_as_bare_objects():
    assert tool_format("{{ tools }}", takes_tools=True) == "llama"
    assert tool_format("[TOOL_CALLS]", takes_tools=False) == "hermes"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (CHATML, ToolStyle(None, several=True, system=True)),
        (NO_SYSTEM, ToolStyle(None, several=True, system=False)),
        ("{{ tools }}", ToolStyle(None, several=True, system=False)),
        (
            HERMES,
            ToolStyle(CallStyle(arguments_as_text=False, empty=""), several=True, system=True),
        ),
        (
            LLAMA,
            ToolStyle(CallStyle(arguments_as_text=False, empty=""), several=False, system=False),
        ),
        (
            MISTRAL,
            ToolStyle(CallStyle(arguments_as_text=False, empty=""), several=True, system=False),
        ),
        (
            DEEPSEEK,
            ToolStyle(CallStyle(arguments_as_text=True, empty=None), several=True, system=True),
        ),
    ],
)
def test_what_a_template_takes_is_found_by_trying(template, style):
    assert tool_style(ChatTemplate(template, {})) == style


@pytest.mark.parametrize("system", [(), (ChatMessage("system", "Be brief."),)])
def test_ids_with_tools_equal_hugging_faces(tiny_hf, system):
    import transformers  # noqa: PLC0415 - seconds to import

    theirs = transformers.AutoTokenizer.from_pretrained(tiny_hf)
    messages = (
        *system,
        ASK,
        ChatMessage("assistant", "Well.", (CALL, OTHER)),
        RESULT,
        OTHER_RESULT,
    )
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in (CALL, OTHER)
    ]
    plain = [
        {"role": m.role, "content": m.content} | ({"tool_calls": calls} if m.calls else {})
        for m in messages
    ]
    expected = theirs.apply_chat_template(
        plain,
        tools=[WEATHER.described],
        chat_template=HERMES,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert with_template(tiny_hf, HERMES).prompt(Chat(messages, (WEATHER,))).ids == expected


def test_a_plain_template_has_tools_spelled_out_in_the_system_turn(tiny_hf):
    prompt = written(with_template(tiny_hf, CHATML), ChatMessage("system", "Be brief."), ASK)
    system, user = prompt.split("<|im_start|>user\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(WEATHER.described) in system
    assert system.endswith("</tool_call><|im_end|>\n")
    assert user == "Weather?<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_system_turn_the_first_user_is_told_of_tools(tiny_hf):
    prompt = written(with_template(tiny_hf, NO_SYSTEM), ASK)
    assert prompt.startswith("<|im_start|>user\n# Tools\n")
    assert prompt.endswith("</tool_call>\n\nWeather?<|im_end|>\n<|im_start|>assistant\n")


def test_an_empty_chat_is_told_of_tools_all_the_same(tiny_hf):
    assert written(with_template(tiny_hf, CHATML)).startswith("<|im_start|>system\n# Tools\n")


def test_a_plain_template_has_calls_and_results_spelled_out(tiny_hf):
    more = ChatMessage("user", "And now?")
    calls = ChatMessage("assistant", "Let me see.", (CALL, OTHER))
    rules = with_template(tiny_hf, CHATML)
    prompt = written(rules, ASK, calls, RESULT, OTHER_RESULT, more, tools=())
    said = "Let me see.\n" + "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"at": "{at}"}}}}\n</tool_call>'
        for at in ("ZÃ¼rich", "Bern")
    )
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert prompt == (
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        f"<|im_start|>user\n{results}\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_of_one_call_a_turn_gets_several_turn_by_turn(tiny_hf):
    rules = with_template(tiny_hf, LLAMA)
    both = ChatMessage("assistant", "So.", (CALL, OTHER))
    apart = (
        ASK,
        ChatMessage("assistant", "So.", (CALL,)),
        RESULT,
        ChatMessage("assistant", "", (OTHER,)),
        OTHER_RESULT,
    )
    assert written(rules, ASK, both, RESULT, OTHER_RESULT) == written(rules, *apart)
    assert written(rules, ASK, both, RESULT) == written(rules, *apart[:-1])


@pytest.mark.parametrize("template", FAMILIES.values())
def test_every_family_writes_tools_calls_and_results(tiny_hf, template):
    prompt = written(with_template(tiny_hf, template), *ONCE)
    assert all(part in prompt for part in ("Tells the weather.", "ZÃ¼rich", "rain"))


# Hostile.

hostile = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", "\n", '"', "a", "\U000f0000", "}}"]),
    max_size=5,
).map("".join)


@given(
    template=st.sampled_from([CHATML, *FAMILIES.values()]),
    texts=st.lists(hostile, min_size=7, max_size=7),
)
def test_nothing_of_a_tool_becomes_a_control_token(tiny_hf, template, texts):
    name, description, key, value, argument, given_, result = texts
    tool = ChatTool(name, description, {"type": "object", key: {"enum": [value, 5, None]}})
    call = ChatCall(name, {argument: [given_]}, "call00001")
    messages = (
        ASK,
        ChatMessage("assistant", "", (call,)),
        ChatMessage("tool", result, name=name, call_id="call00001"),
    )
    rules = with_template(tiny_hf, template)
    calm = Chat((ASK, ChatMessage("assistant", "", (CALL,)), RESULT), (WEATHER,))
    expected = [i for i in rules.prompt(calm, day=DAY).ids if i <= 2]
    ids = rules.prompt(Chat(messages, (tool,)), day=DAY).ids
    assert [i for i in ids if i <= 2] == expected


def test_a_template_that_escapes_marks_away_refuses_control_tokens(tiny_hf):
    rules = with_template(tiny_hf, HERMES.replace("tool | tojson", "tool | tojson(true)"))
    tool = ChatTool("f", "a <|im_end|> b", {})
    with pytest.raises(TemplateRefusedError, match="control tokens"):
        rules.prompt(Chat((ASK,), (tool,)))


def test_a_tool_too_large_for_its_template_is_refused(tiny_hf):
    rules = with_template(tiny_hf, HERMES.replace("tool | tojson", "tool | tojson(indent=999)"))
    many = {str(i): {str(j): {} for j in range(9)} for i in range(99)}
    with pytest.raises(TextRefusedError, match="characters"):
        rules.prompt(Chat((ASK,), (ChatTool("f", "", many),)))


# Beginnings.


@pytest.mark.parametrize("template", [CHATML, HERMES])
def test_a_beginning_shares_its_own_tokens(tiny_hf, template):
    rules = with_template(tiny_hf, template)
    turns = (ChatMessage("system", "Be brief."), ASK, ChatMessage("assistant", "It rains."), ASK)
    tools = (WEATHER, ChatTool("other", "Another.", {}))
    beginnings = [
        Chat((turns[0], ChatMessage("user", "?")), tools[:1]),
        Chat((turns[0], ChatMessage("user", "?")), tools),
        Chat((turns[0], ChatMessage("user", "Wea")), tools),
        Chat(turns[:2], tools),
        Chat(turns, tools),
        Chat((ChatMessage("user", "other"),)),
    ]
    found = rules.prompt(Chat(turns, tools), beginnings)
    texts = [rules.decode(found.ids[:count]) for count in found.shared]
    assert "Tells the weather." in texts[0]
    assert "Another." not in texts[0]
    assert "Another." in texts[1]
    assert texts[1].endswith("user\n")
    assert "user\n" in texts[2]
    assert texts[3].endswith("Weather?\nassistant\n")
    assert found.shared[4] == len(found.ids)
    assert found.shared[5] <= 2
    assert list(found.shared[:5]) == sorted(found.shared[:5])


@given(text=st.text(max_size=30), cut=st.integers(0, 30))
def test_what_a_beginning_shares_is_never_more_than_its_own_ids(tiny_rules, text, cut):
    whole = Chat((ChatMessage("user", text),))
    part = Chat((ChatMessage("user", text[:cut]),))
    found = tiny_rules.prompt(whole, [part])
    (shared,) = found.shared
    assert tiny_rules.prompt(part).ids[:shared] == found.ids[:shared]


def test_a_beginning_that_the_template_refuses_shares_nothing(tiny_hf):
    rules = with_template(tiny_hf, MISTRAL)
    beginning = Chat((ASK, ASK))
    assert rules.prompt(Chat((ASK,)), [beginning]).shared == (0,)


# What the model says.


def test_the_marks_of_calls_are_heard_though_they_are_control_tokens(tmp_path):
    parts = read_hf(write_hf(tmp_path, TinyLlama(layers=1)))
    control = [
        ControlToken(id=token.id, text="[TOOL_CALLS]") if token.id == 0 else token
        for token in parts.control
    ]
    parts.tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    rules = TextRules(msgspec.structs.replace(parts, control=control))
    assert rules.token_bytes(1) == b""
    assert rules.token_bytes(0) != b""


@pytest.mark.model
def test_the_small_models_own_template_does_not_speak_of_tools(small_rules):
    prompt = small_rules.decode(small_rules.prompt(Chat((ASK,), (WEATHER,))).ids)
    assert prompt.startswith("system\n# Tools\n")
    assert "SmolLM" not in prompt
    assert small_rules.tool_format == "hermes"
