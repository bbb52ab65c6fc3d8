"""Tool calls in text: found however the text is cut, and text wherever they are none."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tools.cursor import HELD_CHARS_MAX, Argued, Called, Piece, Said
from gateway.tools.parser import CallForm, CallParser
from text.tool_format import DEEPSEEK_CALL as CALL
from text.tool_format import DEEPSEEK_CALL_END as CALL_END
from text.tool_format import DEEPSEEK_CALLS as CALLS
from text.tool_format import DEEPSEEK_CALLS_END as CALLS_END
from text.tool_format import DEEPSEEK_SEP as SEP

NAMES = ("look", "f")
FORMS: tuple[CallForm, ...] = ("hermes", "llama", "mistral", "deepseek", "object", "list", "bare")


def gathered(pieces: list[Piece]) -> list[tuple[str, ...]]:
    """The same, one entry for each stretch of text and each call."""
    told: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Said(text=text) if told and len(told[-1]) == 1:
                told[-1][0] += text
            case Said(text=text):
                told.append([text])
            case Called(index=index, name=name):
                assert index == sum(len(each) == 2 for each in told)
                told.append([name, ""])
            case Argued(index=index, text=text):
                assert text
                assert index == sum(len(each) == 2 for each in told) - 1
                told[-1][1] += text
    return [tuple(each) for each in told]


def parse(
    form: CallForm, text: str, *, names: tuple[str, ...] = NAMES, parallel: bool = True
) -> list[tuple[str, ...]]:
    return gathered(CallParser(form, names, parallel=parallel).feed(text, final=True))


def in_pieces(parser: CallParser, pieces: list[str]) -> list[tuple[str, ...]]:
    told = [piece for text in pieces for piece in parser.feed(text)]
    return gathered([*told, *parser.feed("", final=True)])


CALL_F = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
LAST = f"{CALL}function{SEP}f\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
ONE = ("look", '{"at": [1, "}"]}')
TWO = ("f", "{}")


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "look", "arguments": {"at": [1, "}"]}}\n</tool_call>',
            [ONE],
        ),
        (
            "hermes",
            'Well.\n<tool_call>{"name":"look","arguments":{"at": [1, "}"]}}</tool_call>\n' + CALL_F,
            [("Well.",), ONE, TWO],
        ),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>\nSo.', [TWO, ("\nSo.",)]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}', [TWO]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}</tool_call>', [TWO]),
        ("hermes", '<tool_call>{"arguments":{"at": [1, "}"]},"name":"look"}', [ONE]),
        ("hermes", '<tool_call>{"id":"x","name":"f"}</tool_call>', [TWO]),
        ("hermes", '<tool_call>{"name":"f","arguments":{},"id":"x"}</tool_call>', [TWO]),
        ("hermes", '<tool_call>{"name":"\\u0066","arguments":{}}</tool_call>', [TWO]),
        ("llama", ' {"name": "look", "parameters": {"at": [1, "}"]}}', [ONE]),
        ("llama", '{"name":"f","parameters":{}}; {"name":"f"}\n', [TWO, TWO]),
        ("llama", '<|python_tag|>{"type":"function","name":"f","parameters":{}}', [TWO]),
        ("llama", 'So: <|python_tag|>{"name":"f","parameters":{}};', [("So:",), TWO]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name":"look","arguments":{"at": [1, "}"]}}, {"name":"f"}]',
            [ONE, TWO],
        ),
        ("mistral", 'Hm. [TOOL_CALLS]look{"at": [1, "}"]}[TOOL_CALLS]f {}', [("Hm.",), ONE, TWO]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{}", [TWO]),
        (
            "deepseek",
            f'{CALLS}{CALL}function{SEP}look\n```json\n{{"at": [1, "}}"]}}\n```{CALL_END}\n{LAST}',
            [ONE, TWO],
        ),
        ("deepseek", f"So.{CALLS}{CALL}f{SEP}{{}}{CALL_END}{CALLS_END}", [("So.",), TWO]),
        ("deepseek", f"{CALL}f{SEP}{{}}{CALL_END}", [TWO]),
        ("object", '{"name":"f","arguments":{}}', [TWO]),
        ("list", '[{"name":"look","arguments":{"at": [1, "}"]}},{"name":"f"}]', [ONE, TWO]),
    ],
)
def test_a_call_is_told_by_name_and_arguments(
    form: CallForm, text: str, expected: list[tuple[str, ...]]
) -> None:
    assert parse(form, text) == expected
    assert in_pieces(CallParser(form, NAMES, parallel=True), list(text)) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *((form, text) for form in FORMS[:-1] for text in ("", "Hello ", " \n", "{", "[", "<")),
        ("hermes", "a <tool_call> b"),
        ("hermes", '<tool_call>{"name":"unknown","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":5}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{}'.replace("f", "unknown")),
        ("hermes", '<tool_call>{"name":"f","other":5}</tool_call>'),
        ("hermes", '<tool_call>{"name":5}</tool_call>'),
        ("hermes", '<tool_call>{"name" "f"}</tool_call>'),
        ("hermes", '<tool_call>{"id":5,"name":"f"}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f\n"}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f"'),
        ("hermes", '<tool_call>{"arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments":[],"name":"f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments":{"a'),
        ("hermes", '<tool_call>{"arguments":{},"arguments":{},"name":"f"}</tool_call>'),
        ("hermes", '<tool_call>{"name":"' + "f" * 300 + '"}'),
        ("hermes", "<tool_call>" + " " * 300 + '{"name":"f"}'),
        ("hermes", '<tool_call>["f", {}]</tool_call>'),
        ("hermes", "half <tool_ca"),
        ("llama", '{"answer": {"name": "f"}}'),
        ("llama", 'It is {"name": "f", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]unknown{}"),
        ("mistral", '[TOOL_CALLS][{"name":"unknown"}]'),
        ("deepseek", f"{CALLS} {CALLS_END}"),
        ("deepseek", f"{CALL}unknown{SEP}{{}}"),
        ("deepseek", f"{CALL}function{SEP}unknown\n```json\n{{}}\n```"),
        ("deepseek", f"{CALL}function"),
        ("list", '["f"]'),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(form: CallForm, text: str) -> None:
    expected = [(text,)] if text else []
    assert parse(form, text) == expected
    assert in_pieces(CallParser(form, NAMES, parallel=True), list(text)) == expected


def test_white_space_beside_calls_is_nobodys() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert parse("hermes", f" \n{call}\n\n {call} \n") == [TWO, TWO]
    assert parse("hermes", f"a \n{call}") == [("a",), TWO]


@pytest.mark.parametrize("spaces", [255, 256, 257, 1000])
def test_white_space_without_end_is_not_held_for_ever(spaces: int) -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    kept = max(0, spaces - 256)
    for pieces in ([f"{' ' * spaces}{call}"], [*(" " * spaces), call]):
        told = in_pieces(CallParser("hermes", NAMES, parallel=True), pieces)
        assert told == [*([(" " * kept,)] if kept else []), TWO]
    after = [(" " * spaces,)] if kept else []
    for pieces in ([call + " " * spaces], [call, *(" " * spaces)]):
        assert in_pieces(CallParser("hermes", NAMES, parallel=True), pieces) == [TWO, *after]


def test_arguments_that_break_off_stay_as_far_as_they_were_told() -> None:
    parser = CallParser("hermes", NAMES, parallel=True)
    told = parser.feed('<tool_call>{"name":"f","arguments":{"a": 1', final=True)
    assert gathered(told) == [("f", '{"a": 1')]
    assert not parser.called


def test_arguments_that_are_no_json_are_text_from_where_they_fail() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a": nul}}</tool_call> b'
    assert parse("hermes", text) == [("f", '{"a": nul'), ("}}</tool_call> b",)]


def test_held_arguments_that_are_too_long_are_text() -> None:
    long = '<tool_call>{"arguments":{"a":"' + "x" * HELD_CHARS_MAX + '"},"name":"f"}</tool_call>'
    assert parse("hermes", long) == [(long,)]


def test_a_second_call_is_not_told_where_one_is_the_most() -> None:
    parser = CallParser("hermes", NAMES, parallel=False)
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert gathered(parser.feed(f"a {call} b {call} c", final=True)) == [("a",), TWO]
    assert parser.called


def test_a_call_that_broke_was_the_one_there_may_be() -> None:
    parser = CallParser("hermes", NAMES, parallel=False)
    broken = '<tool_call>{"name":"f","arguments":{"a": nul}}</tool_call>'
    call = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
    told = gathered(parser.feed(f"{broken} {call}", final=True))
    assert told == [("f", '{"a": nul'), ("}}</tool_call>",)]
    assert not parser.called


def test_the_one_tools_arguments_may_be_all_there_is() -> None:
    assert parse("bare", ' {"a": 1} ', names=("f",)) == [("f", '{"a": 1}')]
    assert parse("bare", "Hello", names=("f",)) == [("Hello",)]


def test_text_is_held_only_while_it_could_be_a_mark() -> None:
    parser = CallParser("hermes", NAMES, parallel=True)
    assert parser.feed("a <b <tool") == [Said("a <b")]
    assert parser.feed("s> <") == [Said(" <tools>")]
    assert parser.feed("tool_call>") == []
    assert parser.feed(' {"name": "f", "arguments": {"x') == [Called(0, "f"), Argued(0, '{"x')]


# Splits.

fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
        *("[CALL_ID]", CALLS, CALL, SEP, CALL_END, CALLS_END, "function", "```json", "```"),
        *('{"name": "f", "arguments": ', '{"name":"look"', '"parameters":', '"arguments":{'),
        *('"id":"1"', "{", "}", "[", "]", ",", ":", ";", '"', "\\", "\\u00", "12", "-0.5e", "null"),
        *(" ", "\n", "text", "look", "f", '{"a": "\\"}"}', "{}", '"a":', "é", "\x00"),
    ]
)
noise = st.lists(fragments, max_size=14).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=4), values, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


def written(form: CallForm, calls: list[tuple[str, str]]) -> str:
    if form == "bare":
        return calls[0][1]
    before, one, between, after = {
        "hermes": ("", '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n", ""),
        "llama": ("", '{"name": "%s", "parameters": %s}', "; ", ""),
        "mistral": ("", "[TOOL_CALLS]%s[ARGS]%s", "", ""),
        "deepseek": (CALLS, f"{CALL}%s{SEP}%s{CALL_END}", "\n", CALLS_END),
        "object": ("", '{"name": "%s", "arguments": %s}', "", ""),
        "list": ("[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    }[form]
    return before + between.join(one % call for call in calls) + after


@given(form=st.sampled_from(FORMS), text=noise, at=st.lists(st.integers(0, 500), max_size=8))
@example(form="hermes", text='<tool_call>{"name": "f", "arguments": {"a":12 ', at=[45])
def test_the_parse_does_not_depend_on_the_pieces(form: CallForm, text: str, at: list[int]) -> None:
    names = NAMES[:1] if form == "bare" else NAMES
    whole = parse(form, text, names=names)
    assert in_pieces(CallParser(form, names, parallel=True), cut(text, at)) == whole
    assert in_pieces(CallParser(form, names, parallel=True), list(text)) == whole


@given(
    form=st.sampled_from(FORMS),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3),
    at=st.lists(st.integers(0, 500), max_size=8),
)
def test_every_form_gives_back_the_calls_that_were_written(
    form: CallForm, calls: list[tuple[str, str]], at: list[int]
) -> None:
    if form in ("bare", "object"):
        del calls[1:]
    names = (calls[0][0],) if form == "bare" else NAMES
    pieces = cut(written(form, calls), at)
    assert in_pieces(CallParser(form, names, parallel=True), pieces) == calls


@given(form=st.sampled_from(FORMS), text=noise)
def test_no_character_is_lost_when_there_is_no_call(form: CallForm, text: str) -> None:
    told = parse(form, text, names=("look",) if form == "bare" else ("nobody",))
    if all(len(each) == 1 for each in told):
        assert told == ([(text,)] if text else [])


@given(form=st.sampled_from(FORMS), text=st.text(max_size=40))
def test_any_text_at_all_is_taken(form: CallForm, text: str) -> None:
    parse(form, text, names=("look",))
