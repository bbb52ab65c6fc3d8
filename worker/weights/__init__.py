"""A model's weights, from whatever format they are stored in, under one set of names.

Not the model: nothing here computes. Whatever is returned is complete, finite, of the
expected shapes and in Hugging Face names; anything we cannot run is refused by name here,
before a byte of KV is reserved.
"""

import math
from pathlib import Path

import torch

from worker.weights.config import LlamaConfig, UnsupportedModelError, Weights, expected_shapes
from worker.weights.gguf_file import count_gguf, read_gguf
from worker.weights.safetensors_files import count_safetensors, read_safetensors

__all__ = ["LlamaConfig", "UnsupportedModelError", "Weights", "count_weights", "load_weights"]


def load_weights(path: Path, dtype: torch.dtype) -> Weights:
    """Read `path`: a `.gguf` file, or a directory with one, or one in Hugging Face layout.

    Tensors are converted to `dtype` one by one, so the peak is the result and one tensor.

    Raises:
        UnsupportedModelError: the message names what we cannot run, or what is broken.
    """
    file = _gguf_in(path)
    weights = read_gguf(file, dtype) if file else read_safetensors(path, dtype)
    _check(weights)
    return weights


def count_weights(path: Path) -> int:
    """How many numbers `load_weights` will hold at most, without reading them.

    Raises:
        UnsupportedModelError: a file that cannot be read.
    """
    file = _gguf_in(path)
    return count_gguf(file) if file else count_safetensors(path)


def _gguf_in(path: Path) -> Path | None:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UnsupportedModelError(f"more than one GGUF file in {path.name}: {names}")
    return found[0] if found else None


def _check(weights: Weights) -> None:
    expected = expected_shapes(weights.config)
    for name in weights.tensors.keys() - expected.keys():
        raise UnsupportedModelError(f"tensor {name} has no place in a Llama")
    for name, shape in expected.items():
        tensor = weights.tensors.get(name)
        if tensor is None:
            raise UnsupportedModelError(f"tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModelError(f"tensor {name} is {tuple(tensor.shape)}, not {shape}")
        # One infinity would spread through the KV cache to whoever uses its block next. A sum
        # finds it in one pass over the tensor.
        if not math.isfinite(tensor.sum(dtype=torch.float32).item()):
            raise UnsupportedModelError(f"tensor {name} holds values that are not finite")
