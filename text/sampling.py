"""How a model is drawn from when a request does not say: its `generation_config.json`.

The file's other fields (lengths, penalties, ends) are not read here. Invariant: defaults that
were read are ones that a worker accepts.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from text.parts import TokenizerFilesError

NAME = "generation_config.json"
TOP_K_MAX = 2**31 - 1


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """One model version's own; without a word from it, the plain distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the file; null is as good as absent."""

    do_sample: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=TOP_K_MAX)] | None = None


def read_sampling(directory: Path) -> SamplingDefaults:
    """Of a version's directory. `do_sample: false` means greedy, whatever temperature is there.

    Raises TokenizerFilesError, naming the field.
    """
    path = directory / NAME
    if not path.is_file():
        return SamplingDefaults()
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TokenizerFilesError(f"{NAME} cannot be used: {error}") from error
    said = {
        "temperature": 0.0 if file.do_sample is False else file.temperature,
        "top_p": file.top_p,
        "top_k": file.top_k,
    }
    found = {name: value for name, value in said.items() if value is not None}
    return msgspec.convert(found, SamplingDefaults)
