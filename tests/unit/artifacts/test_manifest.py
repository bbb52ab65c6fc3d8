"""The version hash covers what decides the tokens, and nothing else."""

import msgspec
import pytest

from artifacts.manifest import Contents, FileEntry, contents_of, manifest_of, version_hash

CONTENTS = Contents(
    format="safetensors",
    family="llama",
    context_tokens=512,
    weight_dtype="bf16",
    compute_dtype="float32",
    files=(
        FileEntry(path="config.json", sha256="aa", bytes=1),
        FileEntry(path="model.safetensors", sha256="bb", bytes=2),
    ),
    tokenizer_sha256="cc",
    template_sha256="dd",
)


def test_the_hash_of_known_contents_never_changes():
    """Another value here means that every version in every store has another name."""
    assert version_hash(CONTENTS) == (
        "701fce3f5d4cea05d1235c0912acd7e8f4adef0370203dc164d0b0dad5cb2766"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"format": "gguf"},
        {"family": "other"},
        {"context_tokens": 513},
        {"weight_dtype": "f32"},
        {"compute_dtype": "bfloat16"},
        {"files": CONTENTS.files[:1]},
        {"files": (CONTENTS.files[0], FileEntry(path="other", sha256="bb", bytes=2))},
        {"tokenizer_sha256": "ce"},
        {"template_sha256": "de"},
    ],
)
def test_whatever_decides_the_tokens_changes_the_hash(change):
    assert version_hash(msgspec.structs.replace(CONTENTS, **change)) != version_hash(CONTENTS)


def test_the_order_of_files_does_not_change_the_hash():
    turned = msgspec.structs.replace(CONTENTS, files=CONTENTS.files[::-1])
    assert version_hash(turned) == version_hash(CONTENTS)


def test_name_source_and_time_do_not_change_the_hash():
    one = manifest_of(CONTENTS, name="a", source="b", created_ms=1)
    two = manifest_of(CONTENTS, name="c", source="d", created_ms=2)
    assert one.version == two.version == version_hash(CONTENTS)
    assert contents_of(one) == CONTENTS
    assert one.bytes == 3
