"""What a model version is made of, and the hash that names it.

The hash covers everything that decides which tokens come out, and nothing else: not the
name, the source or the time. Equal bytes have equal hashes on every machine.
"""

import hashlib
from typing import Literal

import msgspec

MANIFEST_NAME = "manifest.json"
# Rises when the same files would be read to another meaning.
HASH_SCHEME = 1

Format = Literal["gguf", "safetensors"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a version. `path` is its name in the version's directory."""

    path: str
    sha256: str
    bytes: int


class Contents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the hash covers."""

    format: Format
    family: str
    context_tokens: int
    weight_dtype: str
    compute_dtype: ComputeDtype
    files: tuple[FileEntry, ...]  # by path
    tokenizer_sha256: str
    template_sha256: str  # of the chat template's text; of no bytes when there is none


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version as it is recorded beside its files."""

    version: str
    name: str
    source: str
    format: Format
    family: str
    context_tokens: int
    weight_dtype: str
    compute_dtype: ComputeDtype
    files: tuple[FileEntry, ...]
    tokenizer_sha256: str
    template_sha256: str
    created_ms: int

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files)


def version_hash(contents: Contents) -> str:
    """64 hex digits over a canonical form: sorted keys, files by path."""
    files = tuple(sorted(contents.files, key=lambda entry: entry.path))
    ordered = msgspec.structs.replace(contents, files=files)
    body = msgspec.json.encode([HASH_SCHEME, ordered], order="sorted")
    return hashlib.sha256(body).hexdigest()


def manifest_of(contents: Contents, *, name: str, source: str, created_ms: int) -> Manifest:
    """Contents under their hash, with where they came from."""
    return Manifest(
        version=version_hash(contents),
        name=name,
        source=source,
        created_ms=created_ms,
        **msgspec.structs.asdict(contents),
    )


def contents_of(manifest: Manifest) -> Contents:
    """What `manifest.version` should be the hash of."""
    fields = msgspec.structs.asdict(manifest)
    return Contents(**{name: fields[name] for name in Contents.__struct_fields__})
