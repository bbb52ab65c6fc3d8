"""What a GGUF file says of itself, read by the `gguf` library but for the vocabulary.

The library makes an array of every token: seconds for a list that is only hashed here. So
arrays stay the bytes they are in the file.
"""

import hashlib
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

_LENGTH = struct.Struct("<Q")
_ARRAY = struct.Struct("<IQ")


class GGUFHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Scalar values by key; bytes of tensors by their type's name in lower case."""

    values: dict[str, Any]
    dtype_bytes: Counter[str]
    tokenizer_sha256: str


def read_gguf_header(path: Path) -> GGUFHeader:
    """Raises whatever broken bytes lead the library into: ValueError, IndexError and more."""
    reader = _Reader(path)
    values: dict[str, Any] = {}
    tokenizer = hashlib.sha256()
    for key, field in sorted(reader.fields.items()):
        raw = b"".join(part.tobytes() for part in field.parts)
        if key.startswith("tokenizer.ggml."):
            tokenizer.update(_LENGTH.pack(len(raw)) + raw)
        if field.types != [gguf.GGUFValueType.ARRAY]:
            values[key] = field.contents()
    dtype_bytes: Counter[str] = Counter()
    for tensor in reader.tensors:
        dtype_bytes[tensor.tensor_type.name.lower()] += int(tensor.n_bytes)
    return GGUFHeader(
        values=values, dtype_bytes=dtype_bytes, tokenizer_sha256=tokenizer.hexdigest()
    )


class _Reader(gguf.GGUFReader):
    """Keeps an array as one part."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        kind, count = _ARRAY.unpack_from(data, orig_offs)
        end = orig_offs + _ARRAY.size
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += _LENGTH.size + _LENGTH.unpack_from(data, end)[0]
        else:
            # KeyError for arrays of arrays, which no writer makes.
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return end - orig_offs, [self.data[orig_offs:end]], [0], [gguf.GGUFValueType.ARRAY]
