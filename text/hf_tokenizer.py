"""Reads a tokenizer from a directory in Hugging Face layout.

`tokenizer.json` is the tokenizer; `tokenizer_config.json`, `generation_config.json` and
`config.json` say what it leaves out. `chat_template.jinja` goes before a template inside
`tokenizer_config.json`, as in transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from text.control import ControlToken
from text.parts import TokenizerFilesError, TokenizerParts

_NAMED_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


def read_hf(directory: Path) -> TokenizerParts:
    """Raises TokenizerFilesError."""
    config = _read_json(directory / "config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    variables = _variables(tokenizer_config)
    # transformers makes every token with a name a control token, whatever tokenizer.json says.
    named = [*variables.values(), *_additional(tokenizer_config)]
    tokenizer.add_special_tokens(
        [text for text in named if tokenizer.token_to_id(text) is not None]
    )
    try:
        return TokenizerParts(
            tokenizer=tokenizer,
            control=_control(tokenizer),
            template=read_template(directory),
            variables=variables,
            prefix_ids=_prefix_ids(tokenizer),
            eos_ids=_eos_ids(directory, config, tokenizer, variables),
            vocab_size=int(config["vocab_size"]),
            context_tokens=int(config["max_position_embeddings"]),
            family=str(config["model_type"]),
        )
    except KeyError as error:
        raise TokenizerFilesError(f"config.json lacks {error}") from error


def read_template(directory: Path) -> str | None:
    """The default chat template's source, None when there is none."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    found = _read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerFilesError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerFilesError(f"{path.name} is not a JSON object")
    return content


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerFilesError("there is no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerFilesError(f"tokenizer.json does not load: {error}") from error
    # A checkpoint may carry the limits of its training run; ours are enforced elsewhere.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _control(tokenizer: Tokenizer) -> list[ControlToken]:
    return [
        ControlToken(
            id=id_,
            text=token.content,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
        )
        for id_, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    ]


def _variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    variables = {}
    for name in _NAMED_TOKENS:
        text = _token_text(tokenizer_config.get(f"{name}_token"))
        if text is not None:
            variables[f"{name}_token"] = text
    return variables


def _additional(tokenizer_config: Mapping[str, Any]) -> list[str]:
    found = tokenizer_config.get("additional_special_tokens") or ()
    return [text for text in map(_token_text, found) if text is not None]


def _token_text(token: object) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _prefix_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts before a text; `add_bos_token` beside it means nothing."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    return tuple(encoding.ids[: mask.index(0)]) if 0 in mask else ()


def _eos_ids(
    directory: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    variables: Mapping[str, str],
) -> frozenset[int]:
    generation = _read_json(directory / "generation_config.json")
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(found) if isinstance(found, list) else {found}
    # Many a chat model corrects only the tokenizer's end token to the end of a turn.
    ids.add(tokenizer.token_to_id(variables.get("eos_token", "")))
    return frozenset(id_ for id_ in ids if isinstance(id_, int))
