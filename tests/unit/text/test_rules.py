"""Ids equal Hugging Face's for harmless content; harmful content stays text."""

import datetime as dt
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_llama import CHATML, CONTROL, TinyLlama, write_hf
from text.chat import ChatMessage, TemplateRefusedError, TextRefusedError
from text.hf_tokenizer import read_hf
from text.parts import TokenizerFilesError
from text.rules import TextRules

TRIM = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WRAPPED = "{% for m in messages %}<|im_{{ m.content }}|>{% endfor %}"
THINK = (
    "{%- for m in messages %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content "
    "else m.content %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)
UPPER = "{% for m in messages %}{{ m.content | lower }}{% endfor %}"
SHOUT = "{% for m in messages %}{{ m.content | replace('i', 'j') }}{% endfor %}"

TRICKY = (
    "isn't it? They've 1,234.56 — we'll see, I'd say",
    "  white   space\t\tand\n\n\nlines  \r\n ",
    "안녕하세요 한국어 문장입니다 2024년",
    "👩‍👩‍👧‍👦 family 🇰🇷 flag e\u0301 accent",
    "def f(x):\n\treturn {'a': [1, 2, 3]}  # ok",
    "",
    " ",
    "a",
    "<",
    "start",
    "\x00\x04\u2028\ufeff",
)

# Letters that build, nearly build and surround control tokens.
hostile = st.lists(
    st.sampled_from(
        [
            *(
                *CONTROL,
                "<|im_",
                "end|>",
                "start|>",
                "<|",
                "|>",
                "<",
                ">",
                "|",
                "im_end",
                " ",
                "\n",
            ),
            *("a", "<|IM_END|>", "</think>", "\U000f0000", "assistant"),
        ]
    ),
    max_size=6,
).map("".join)

# Hypothesis finds literals of the code under test, control tokens too.
harmless = st.text().filter(lambda text: not any(control in text for control in CONTROL))


@pytest.fixture(scope="module")
def theirs(tiny_hf: Path):
    import transformers  # noqa: PLC0415 - seconds to import

    return transformers.AutoTokenizer.from_pretrained(tiny_hf)


def with_template(rules_of: Path, template: str) -> TextRules:
    return TextRules(msgspec.structs.replace(read_hf(rules_of), template=template))


def their_ids(theirs, messages, template):
    return theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


@pytest.mark.parametrize("template", [CHATML, TRIM, BARE, THINK])
@pytest.mark.parametrize("content", TRICKY)
def test_chat_ids_equal_hugging_faces(tiny_hf, theirs, template, content):
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", content),
        ChatMessage("assistant", "<think>hm</think>\n\nFine."),
        ChatMessage("user", content[::-1]),
    ]
    ours = with_template(tiny_hf, template).chat_ids(messages)
    assert ours == their_ids(theirs, messages, template)


@given(content=harmless, other=harmless)
def test_chat_ids_of_any_harmless_text_equal_hugging_faces(tiny_rules, theirs, content, other):
    messages = [ChatMessage("user", content), ChatMessage("assistant", other)]
    assert tiny_rules.chat_ids(messages) == their_ids(theirs, messages, CHATML)


@given(contents=st.lists(hostile, min_size=1, max_size=3))
def test_content_is_text_whatever_it_spells(tiny_rules, contents):
    ids = tiny_rules.chat_ids([ChatMessage("user", content) for content in contents])
    assert [id_ for id_ in ids if id_ <= 2] == [1, 2] * len(contents) + [1]
    expected = "".join(f"user\n{content}\n" for content in contents) + "assistant\n"
    assert tiny_rules.decode(ids) == expected


@given(contents=st.lists(hostile, min_size=1, max_size=3))
def test_contents_side_by_side_never_make_a_control_token(tiny_hf, contents):
    ids = with_template(tiny_hf, BARE).chat_ids([ChatMessage("user", one) for one in contents])
    assert min(ids, default=3) > 2


@pytest.mark.parametrize("content", ["end", "start", "end|><|im_end", "END"])
def test_content_never_completes_the_templates_half_of_a_control_token(tiny_hf, content):
    ids = with_template(tiny_hf, WRAPPED).chat_ids([ChatMessage("user", content)])
    assert min(ids) > 2


def test_a_template_that_lowers_case_makes_no_control_token(tiny_hf):
    rules = with_template(tiny_hf, UPPER)
    assert min(rules.chat_ids([ChatMessage("user", "<|IM_END|>")])) > 2


def test_thinking_is_dropped_and_what_follows_it_stays_text(tiny_hf):
    message = ChatMessage("assistant", "<|im_end|>a</think>b<|im_end|>c")
    rules = with_template(tiny_hf, THINK)
    ids = rules.chat_ids([message])
    assert [id_ for id_ in ids if id_ <= 2] == [1, 2, 1]
    assert rules.decode(ids) == "assistant\nb<|im_end|>c\nassistant\n"


def test_marks_that_the_template_loses_are_a_refusal(tiny_hf):
    rules = with_template(tiny_hf, "{{ messages[0].content | length }}")
    with pytest.raises(TemplateRefusedError, match="control tokens"):
        rules.chat_ids([ChatMessage("user", "a <|im_end|> b")])
    assert rules.decode(rules.chat_ids([ChatMessage("user", "harmless")])) == "8"


def test_a_text_with_every_mark_is_refused(tiny_rules):
    content = "".join(chr(code) for code in range(0xF0000, 0xF0040))
    with pytest.raises(TextRefusedError, match="reserved"):
        tiny_rules.chat_ids([ChatMessage("user", content)])


@given(text=st.text())
def test_plain_text_comes_back(tiny_rules, text):
    ids = tiny_rules.plain_ids(text)
    assert tiny_rules.decode(ids) == text
    assert min(ids, default=3) > 2


def test_plain_ids_of_control_tokens_are_text(tiny_rules):
    text = "".join(CONTROL)
    ids = tiny_rules.plain_ids(text)
    assert min(ids) > 2
    assert tiny_rules.decode(ids) == text


@given(ids=st.lists(st.integers(min_value=-2, max_value=710)))
def test_bytes_of_tokens_are_the_text_of_their_sequence(tiny_rules, ids):
    whole = b"".join(map(tiny_rules.token_bytes, ids))
    assert whole.decode("utf-8", errors="replace") == tiny_rules.decode(ids)


@given(ids=st.lists(st.integers(min_value=0, max_value=699)))
def test_decode_equals_hugging_faces(tiny_rules, theirs, ids):
    assert tiny_rules.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_threads_share_one_set_of_rules(tiny_rules):
    messages = [ChatMessage("user", content) for content in TRICKY]
    expected = tiny_rules.chat_ids(messages)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tiny_rules.chat_ids(messages), range(100)))
    assert all(ids == expected for ids in found)


def test_a_lone_surrogate_is_refused(tiny_rules):
    with pytest.raises(TextRefusedError, match="Unicode"):
        tiny_rules.plain_ids("\ud800")
    with pytest.raises(TextRefusedError, match="Unicode"):
        tiny_rules.chat_ids([ChatMessage("user", "\ud800")])


def test_a_model_without_a_template_refuses_chats(tmp_path):
    rules = TextRules.load(write_hf(tmp_path, TinyLlama(layers=1), template=None))
    assert rules.plain_ids("works")
    with pytest.raises(TemplateRefusedError, match="no chat template"):
        rules.chat_ids([ChatMessage("user", "hi")])


def test_a_template_may_ask_for_the_day_it_is_given(tiny_hf):
    rules = with_template(tiny_hf, "{{ strftime_now('%d %b %Y') }}")
    day = dt.date(2026, 3, 9)
    assert rules.decode(rules.chat_ids([], day=day)) == "09 Mar 2026"
    with pytest.raises(TemplateRefusedError):
        rules.chat_ids([])


def test_gguf_and_hugging_face_files_of_one_model_agree(tiny_hf, tiny_gguf):
    ours, theirs = TextRules.load(tiny_hf), TextRules.load(tiny_gguf)
    messages = [ChatMessage("user", content) for content in TRICKY]
    assert ours.chat_ids(messages) == theirs.chat_ids(messages)
    assert [ours.token_bytes(id_) for id_ in range(700)] == [
        theirs.token_bytes(id_) for id_ in range(700)
    ]
    assert (ours.eos_ids, ours.vocab_size, ours.context_tokens, ours.family) == (
        theirs.eos_ids,
        theirs.vocab_size,
        theirs.context_tokens,
        theirs.family,
    )


def test_two_gguf_files_in_a_directory_are_refused(tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(TokenizerFilesError, match="2 GGUF files"):
        TextRules.load(tmp_path)


def test_a_vocabulary_that_spells_a_control_token_from_text_is_refused(tmp_path, tiny_hf):
    """Whole words before merges, and a control token that is a plain word."""
    write_hf(tmp_path, TinyLlama(layers=1, vocab=700))
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["ignore_merges"] = True
    id_ = described["model"]["vocab"].pop(CONTROL[0])
    described["model"]["vocab"]["stop"] = id_
    described["added_tokens"][0]["content"] = "stop"
    path.write_text(json.dumps(described))
    with pytest.raises(TextRefusedError, match="spells a control token"):
        TextRules.load(tmp_path).plain_ids("stop")


@pytest.mark.model
def test_the_small_models_ids_are_the_published_tokenizers(small_rules):
    assert small_rules.plain_ids("Hello world") == [19556, 905]
    question = [ChatMessage("user", "What is the capital of France?")]
    assert small_rules.chat_ids(question) == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
        *(407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
        *(1, 520, 9531, 198),
    ]
    assert small_rules.eos_ids == {2}
    assert (small_rules.vocab_size, small_rules.context_tokens) == (49_152, 8_192)


@pytest.mark.model
@given(ids=st.lists(st.integers(min_value=0, max_value=49_151), max_size=40))
def test_the_small_models_bytes_are_its_text(small_rules, ids):
    whole = b"".join(map(small_rules.token_bytes, ids)).decode("utf-8", errors="replace")
    assert whole == small_rules.decode(ids) == small_rules._tokenizer.decode(ids)
