"""Defaults for drawing are read from the version's generation config, or refused by field."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_llama import TinyLlama, write_gguf, write_hf
from text.parts import TokenizerFilesError
from text.rules import TextRules
from text.sampling import SamplingDefaults, read_sampling

NAME = "generation_config.json"


def read(folder: Path, content: object) -> SamplingDefaults:
    (folder / NAME).write_text(content if isinstance(content, str) else json.dumps(content))
    return read_sampling(folder)


def test_no_file_is_the_plain_distribution(tmp_path):
    plain = read_sampling(tmp_path)
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": None, "top_p": None, "top_k": None}, SamplingDefaults()),
        ({"eos_token_id": [2], "repetition_penalty": 1.1}, SamplingDefaults()),
        ({"temperature": 0.2, "top_p": 0.9}, SamplingDefaults(temperature=0.2, top_p=0.9)),
        ({"temperature": 0, "top_k": 0}, SamplingDefaults(temperature=0.0)),
        ({"top_p": 1, "top_k": 50}, SamplingDefaults(top_k=50)),
        ({"do_sample": True, "temperature": 0.7}, SamplingDefaults(temperature=0.7)),
        ({"do_sample": None}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.5},
            SamplingDefaults(temperature=0.0, top_p=0.5),
        ),
    ],
)
def test_the_file_is_read(tmp_path, content, expected):
    assert read(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ('{"temperature": 1e999}', "out of range"),
        ('{"temperature": NaN}', "malformed"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"do_sample": "no"}, "do_sample"),
        ([], "object"),
        ("", "truncated"),
        ("{", "truncated"),
    ],
)
def test_nonsense_is_refused_with_its_name(tmp_path, content, message):
    with pytest.raises(TokenizerFilesError, match=rf"{NAME} cannot be used: .*{message}"):
        read(tmp_path, content)


@given(body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path_factory, body):
    folder = tmp_path_factory.getbasetemp()
    (folder / NAME).write_bytes(b'{"temperature":' + body)
    try:
        found = read_sampling(folder)
    except TokenizerFilesError:
        return
    assert 0 <= found.temperature < float("inf")
    assert 0 < found.top_p <= 1


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_rules_of_either_format_know_them(tmp_path, kind):
    if kind == "hf":
        write_hf(tmp_path, TinyLlama(layers=1))
    else:
        write_gguf(tmp_path / "tiny.gguf", TinyLlama(layers=1))
    assert TextRules.load(tmp_path).sampling == SamplingDefaults()
    (tmp_path / NAME).write_text('{"temperature": 0.2, "top_k": 9}')
    assert TextRules.load(tmp_path).sampling == SamplingDefaults(temperature=0.2, top_k=9)
    (tmp_path / NAME).write_text('{"top_p": 7}')
    with pytest.raises(TokenizerFilesError, match="top_p"):
        TextRules.load(tmp_path)


@pytest.mark.model
def test_the_small_model_is_drawn_greedily_unless_told_otherwise(small_rules):
    assert small_rules.sampling.temperature == 0
