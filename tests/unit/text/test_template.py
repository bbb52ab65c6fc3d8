"""Chat templates: what they may use, and what they are refused for."""

import datetime as dt

import pytest

from text.chat import ChatMessage, TemplateRefusedError
from text.template import ChatTemplate

HELLO = [ChatMessage("user", "hello")]


def render(source: str, messages=HELLO, **variables: str) -> str:
    return ChatTemplate(source, variables).render(messages)


def test_the_tokenizers_variables_are_there():
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>hello"


def test_the_names_that_published_templates_expect_are_there():
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ ns.n }}"
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"
        "{{ missing is defined }}{{ strftime_now is defined }}"
    )
    assert render(source) == "1TrueTrueTrueFalseFalse"


def test_blocks_are_trimmed_as_hugging_face_does():
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_json_is_not_escaped_for_html():
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'b': 1} | tojson(indent=1) }}") == '{\n "b": 1\n}'


def test_generation_blocks_are_their_body():
    assert render("a{% generation %}{{ 1 + 1 }}{% endgeneration %}b") == "a2b"


def test_the_day_is_the_one_given():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {})
    assert template.render(HELLO, dt.date(2031, 5, 6)) == "2031-05-06"


def test_the_templates_own_refusal_is_told():
    with pytest.raises(TemplateRefusedError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("role", ["", "im_end", "User", "tool|>"])
def test_a_role_that_no_template_knows_is_refused(role):
    with pytest.raises(TemplateRefusedError, match="role"):
        render("{{ messages[0].role }}", [ChatMessage(role, "x")])


def test_a_template_that_does_not_parse_is_refused_when_compiled():
    with pytest.raises(TemplateRefusedError, match="does not parse"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% include 'other' %}",
        "{{ lipsum(n=100000) }}",
        "{{ range(10 ** 9) }}",
        "{{ range(1000000) | list }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ [0] * 1000000000 }}",
        "{% for i in range(90000) %}{{ 'long enough to be over' }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_reaches_out_or_never_ends_is_refused(source):
    with pytest.raises(TemplateRefusedError):
        render(source)


def test_arithmetic_and_short_rules_are_allowed():
    assert render("{{ 7 % 4 * 2 }}{{ '-' * 3 }}") == "6---"


def test_the_output_may_grow_with_the_content():
    content = "x" * 1_000_000
    assert render("{{ messages[0].content }}" * 3, [ChatMessage("user", content)]) == content * 3
    with pytest.raises(TemplateRefusedError, match="over"):
        render("{{ messages[0].content }}" * 9, [ChatMessage("user", content)])
