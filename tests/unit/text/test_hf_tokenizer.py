"""Tokenizers from Hugging Face files: byte-level and SentencePiece kinds, and broken ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.tiny_llama import CHATML, TinyLlama, write_hf
from text.chat import ChatMessage
from text.hf_tokenizer import read_hf, read_template
from text.parts import TokenizerFilesError
from text.rules import TextRules

INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def change(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_hf(tmp_path, TinyLlama(layers=1))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kind that Llama 2 and Mistral have: `▁` for spaces, bytes as `<0x0A>`."""
    directory = write_hf(tmp_path_factory.mktemp("sp"), TinyLlama(layers=1, vocab=600))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    lines = ["a cat sat on the mat", "[INST] what is it [/INST] it is a cat"]
    tokenizer.train_from_iterator(lines, trainer)
    described = json.loads(tokenizer.to_str())
    kept = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(described | {"added_tokens": kept}))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    change(
        directory / "tokenizer_config.json",
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>"},
        unk_token="<unk>",
        pad_token=None,
        chat_template=INSTRUCT,
    )
    return directory


@pytest.fixture(scope="module")
def theirs(sentencepiece: Path):
    import transformers  # noqa: PLC0415 - seconds to import

    return transformers.AutoTokenizer.from_pretrained(sentencepiece)


@pytest.mark.parametrize("content", ["what is it", " a  cat ", "", "日本\n", "</s", "it's 12"])
def test_sentencepiece_chat_ids_equal_hugging_faces(sentencepiece, theirs, content):
    messages = [ChatMessage("user", content), ChatMessage("assistant", "a cat")]
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        tokenize=True,
        return_dict=False,
    )
    assert TextRules.load(sentencepiece).chat_ids(messages) == expected


@given(text=st.text(alphabet="abc ▁</s>\n日"))
def test_sentencepiece_plain_ids_equal_hugging_faces_with_the_start_token(
    sentencepiece_rules, theirs, text
):
    ids = sentencepiece_rules.plain_ids(text)
    if "</s>" not in text and "<s>" not in text:
        assert ids == theirs(text).input_ids
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])


@pytest.fixture(scope="module")
def sentencepiece_rules(sentencepiece: Path) -> TextRules:
    return TextRules.load(sentencepiece)


def test_sentencepiece_bytes_join_into_characters(sentencepiece_rules):
    ids = sentencepiece_rules.plain_ids("a 日 cat")
    assert sentencepiece_rules.decode(ids) == " a 日 cat"
    assert sentencepiece_rules.chat_ids([ChatMessage("user", "</s>")]).count(2) == 0


def test_added_tokens_with_flags_swallow_what_hugging_faces_do(files):
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|sep|>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(files / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} <|sep|> \n{% endfor %}"
    change(files / "tokenizer_config.json", chat_template=template)
    import transformers  # noqa: PLC0415 - seconds to import

    theirs = transformers.AutoTokenizer.from_pretrained(files)
    messages = [ChatMessage("user", " <think> so "), ChatMessage("user", "yes")]
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        tokenize=True,
        return_dict=False,
    )
    assert TextRules.load(files).chat_ids(messages) == expected


def test_an_added_token_of_other_letters_stands_for_itself(files):
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.add_tokens(["<한국>"])
    tokenizer.save(str(files / "tokenizer.json"))
    id_ = tokenizer.token_to_id("<한국>")
    assert id_ is not None
    assert TextRules.load(files).decode([id_]) == tokenizer.decode([id_]) == "<한국>"


def test_named_tokens_are_control_tokens_though_tokenizer_json_forgets_it(files):
    content = json.loads((files / "tokenizer.json").read_text())
    (files / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))
    change(files / "tokenizer_config.json", unk_token=None)
    assert {token.text for token in read_hf(files).control} == {"<|im_start|>", "<|im_end|>"}
    more = ["<|endoftext|>", "<|not in the vocabulary|>", {"content": "<|im_end|>"}, None]
    change(files / "tokenizer_config.json", additional_special_tokens=more)
    assert {token.id for token in read_hf(files).control} == {0, 1, 2}


def test_the_template_file_goes_before_the_one_in_the_configuration(files):
    assert read_template(files) == CHATML
    (files / "chat_template.jinja").write_text("from the file")
    assert read_template(files) == "from the file"


def test_of_several_templates_the_default_is_taken(files):
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    change(files / "tokenizer_config.json", chat_template=several)
    assert read_template(files) == "b"
    change(files / "tokenizer_config.json", chat_template=several[:1])
    assert read_template(files) is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 0]}, 1, {2, 0}),
        ({"eos_token_id": 0}, 1, {0, 2}),
        ({}, 1, {1, 2}),
        ({"eos_token_id": None}, None, {2}),
    ],
)
def test_end_tokens_are_those_of_the_generation_and_the_tokenizer(
    files, generation, config, expected
):
    (files / "generation_config.json").write_text(json.dumps(generation))
    change(files / "config.json", eos_token_id=config)
    assert read_hf(files).eos_ids == expected


@pytest.mark.parametrize(
    ("adds_bos", "post_processor", "expected"),
    [
        (None, None, ()),
        (True, None, ()),
        (None, "<|im_start|> $A", (1,)),
        (False, "<|im_start|> $A", (1,)),
        (None, "$A <|im_end|>", ()),
    ],
)
def test_the_start_token_is_added_where_hugging_face_adds_it(
    files, adds_bos, post_processor, expected
):
    if adds_bos is not None:
        change(files / "tokenizer_config.json", add_bos_token=adds_bos)
    if post_processor is not None:
        tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=post_processor, special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
        )
        tokenizer.save(str(files / "tokenizer.json"))
    assert read_hf(files).prefix_ids == expected
    import transformers  # noqa: PLC0415 - seconds to import

    theirs = transformers.AutoTokenizer.from_pretrained(files)("a").input_ids
    assert theirs[: len(expected) + 1] == [*expected, read_hf(files).tokenizer.token_to_id("a")]


def test_limits_left_from_training_are_dropped(files):
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(files / "tokenizer.json"))
    assert TextRules.load(files).decode(TextRules.load(files).plain_ids("abcdefgh")) == "abcdefgh"


def test_broken_files_are_told_by_name(files):
    (files / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer_config.json is not a JSON object"):
        read_hf(files)
    (files / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer_config.json is not JSON"):
        read_hf(files)
    (files / "tokenizer_config.json").unlink()
    (files / "config.json").write_text("{}")
    with pytest.raises(TokenizerFilesError, match=r"config.json lacks 'vocab_size'"):
        read_hf(files)
    (files / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer.json does not load"):
        read_hf(files)
    (files / "tokenizer.json").unlink()
    with pytest.raises(TokenizerFilesError, match=r"no tokenizer.json"):
        read_hf(files)


def test_a_decoder_that_needs_the_whole_text_is_refused(files):
    change(files / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(TokenizerFilesError, match="WordPiece"):
        TextRules.load(files)
    change(files / "tokenizer.json", decoder=None)
    with pytest.raises(TokenizerFilesError, match="not supported"):
        TextRules.load(files)
