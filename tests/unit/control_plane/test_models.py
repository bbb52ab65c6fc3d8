"""What a manifest must be to be registered."""

import msgspec
import pytest

from artifacts.manifest import Contents, FileEntry, manifest_of
from control_plane.api.models import check_manifest
from core.errors import RefusedError

CONTENTS = Contents(
    format="gguf",
    family="llama",
    context_tokens=64,
    weight_dtype="f32",
    compute_dtype="float32",
    files=(FileEntry(path="model.gguf", sha256="ab" * 32, bytes=5),),
    tokenizer_sha256="cd" * 32,
    template_sha256="ef" * 32,
)
MANIFEST = manifest_of(CONTENTS, name="tiny", source="test", created_ms=1)


def test_a_manifest_under_its_own_hash_stands():
    check_manifest(MANIFEST)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("manifest.version", {"version": "00" * 32}),
        ("manifest.version", {"weight_dtype": "q4_1"}),  # other content under the same hash
        ("manifest.name", {"name": "no spaces please"}),
        ("manifest.context_tokens", {"context_tokens": 0}),
        ("manifest.context_tokens", {"context_tokens": 2**31}),
        ("manifest.files", {"files": ()}),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(field, changes):
    with pytest.raises(RefusedError) as caught:
        check_manifest(msgspec.structs.replace(MANIFEST, **changes))
    assert (caught.value.refusal.status, caught.value.refusal.param) == (422, field)
