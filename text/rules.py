"""Text to ids and back, by one model version's own files.

Thread-safe. Every function is plain and may take milliseconds on long texts: call it in a
thread from an event loop (encoding and rendering of long texts; the encoder releases the
GIL). Two invariants: no character of message content ever becomes a control token, and for
content without control tokens the ids are Hugging Face's `apply_chat_template`'s own.
"""

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from text.chat import ChatMessage, TemplateRefusedError, TextRefusedError
from text.control import ControlTokens, Rendered, choose_mark, unmark
from text.gguf_tokenizer import read_gguf
from text.hf_tokenizer import read_hf
from text.parts import TokenizerFilesError, TokenizerParts
from text.sampling import SamplingDefaults, read_sampling
from text.template import ChatTemplate
from text.token_bytes import token_bytes_table


class TextRules:
    """The text rules of one model version."""

    def __init__(self, parts: TokenizerParts, sampling: SamplingDefaults | None = None) -> None:
        self._tokenizer = parts.tokenizer
        self._tokenizer.encode_special_tokens = True
        self._inner = _inner_tokenizer(parts.tokenizer)
        self._control = ControlTokens(parts.control)
        self._template = (
            None if parts.template is None else ChatTemplate(parts.template, parts.variables)
        )
        self._prefix_ids = list(parts.prefix_ids)
        self._bytes = token_bytes_table(parts.tokenizer, self._control.ids, parts.vocab_size)
        self.eos_ids = parts.eos_ids
        self.vocab_size = parts.vocab_size
        self.context_tokens = parts.context_tokens
        self.family = parts.family
        self.sampling = sampling or SamplingDefaults()

    @classmethod
    def load(cls, directory: Path) -> "TextRules":
        """From a version's directory: one GGUF file, or Hugging Face's files, and how to draw.

        Raises TokenizerFilesError, TemplateRefusedError.
        """
        found = sorted(directory.glob("*.gguf"))
        if len(found) > 1:
            raise TokenizerFilesError(f"{directory} holds {len(found)} GGUF files")
        parts = read_gguf(found[0]) if found else read_hf(directory)
        return cls(parts, read_sampling(directory))

    def chat_ids(self, messages: Sequence[ChatMessage], *, day: dt.date | None = None) -> list[int]:
        """The prompt of a chat, open for the assistant's answer.

        `day` is for templates that write the date; without it they fall back or refuse.
        Raises TextRefusedError; TemplateRefusedError when it is the template that refuses.
        """
        rendered = self._render(messages, day)
        ids: list[int] = []
        runs: list[str] = []
        slots: list[int | None] = []  # a control id, or None where a run belongs
        position = 0
        for match in self._control.find(rendered):
            runs.append(rendered.text[position : match.start])
            slots += [None, match.id]
            position = match.end
        runs.append(rendered.text[position:])
        slots.append(None)
        encoded = iter(self._encode_runs(runs))
        for slot in slots:
            ids += next(encoded) if slot is None else (slot,)
        return ids

    def plain_ids(self, text: str) -> list[int]:
        """The prompt of a completion: the text, after the model's own start token if it has one.

        Raises TextRefusedError.
        """
        return self._prefix_ids + self._encode_runs([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; control tokens are silent, broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:  # noqa: A002 - the field's own word
        """What one token adds to the text: b"" for control tokens and ids that mean nothing."""
        return self._bytes[id] if 0 <= id < len(self._bytes) else b""

    def _render(self, messages: Sequence[ChatMessage], day: dt.date | None) -> Rendered:
        if self._template is None:
            raise TemplateRefusedError("this model has no chat template; use plain completions")
        plain = self._template.render(messages, day)
        mark = choose_mark([plain, *(message.content for message in messages)])
        marked = [
            msgspec.structs.replace(message, content=self._control.mark(message.content, mark))
            for message in messages
        ]
        if all(a.content == b.content for a, b in zip(messages, marked, strict=True)):
            return Rendered(plain)
        rendered = unmark(self._template.render(marked, day), mark)
        if rendered.text != plain:
            raise TemplateRefusedError(
                "the messages hold characters of control tokens, and this model's chat template "
                "rewrites content in a way that loses track of them"
            )
        return rendered

    def _encode_runs(self, runs: list[str]) -> list[list[int]]:
        """Ids of runs of plain text that follow one another; a control id cannot come out."""
        try:
            ids = [self._encode(self._tokenizer, runs[:1]), self._encode(self._inner, runs[1:])]
        except TypeError as error:  # the library's word for a lone surrogate
            raise TextRefusedError("the text is not valid Unicode") from error
        encoded = [*ids[0], *ids[1]]
        if any(not self._control.ids.isdisjoint(run) for run in encoded):
            raise TextRefusedError("the text spells a control token in this model's vocabulary")
        return encoded

    def _encode(self, tokenizer: Tokenizer, runs: list[str]) -> list[list[int]]:
        # The batch form, because it alone releases the GIL.
        return [e.ids for e in tokenizer.encode_batch_fast(runs, add_special_tokens=False)]


def _inner_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """For runs that are not the start of the text: a "first" prefix space is not theirs."""
    description = tokenizer.to_str()
    text = json.dumps(json.loads(description), ensure_ascii=False)
    inner = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    if inner == text:
        return tokenizer
    copy = Tokenizer.from_str(inner)
    copy.encode_special_tokens = True
    return copy
