"""Text to ids and back, by one model version's own files.

Thread-safe. Every function is plain and may take milliseconds on long texts: call it in a
thread from an event loop (encoding and rendering of long texts; the encoder releases the
GIL). Two invariants: no character of message content, of a tool or of a call ever becomes a
control token, and for content without control tokens the ids are Hugging Face's
`apply_chat_template`'s own. A template that does not speak of tools has them spelled out.
"""

import datetime as dt
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, takewhile, zip_longest
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from text.chat import Chat, ChatMessage, TemplateRefusedError, TextRefusedError
from text.control import ControlTokens, Rendered, choose_mark, unmark
from text.gguf_tokenizer import read_gguf
from text.hf_tokenizer import read_hf
from text.memory import RunMemory
from text.parts import TokenizerFilesError, TokenizerParts
from text.sampling import SamplingDefaults, read_sampling
from text.template import PLAIN_STYLE, ChatTemplate
from text.token_bytes import token_bytes_table
from text.tool_format import MARKS, ToolFormat, tool_format
from text.tool_style import ToolStyle, tool_style
from text.tool_text import spelled

INLINE_CHARS = 4_000  # of all the runs of a prompt: what is encoded where it is asked for


class ChatPrompt(msgspec.Struct, frozen=True):
    """A prompt's ids, and how many of the first it shares with each beginning asked about."""

    ids: list[int]
    shared: tuple[int, ...]


class _Run(msgspec.Struct, frozen=True):
    """The characters [start, end) of a prompt, plain text or one control token, as ids."""

    start: int
    end: int
    ids: Sequence[int]
    control: bool


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
        silent = {token.id for token in parts.control if token.text not in MARKS}
        self._bytes = token_bytes_table(parts.tokenizer, silent, parts.vocab_size)
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
        """The prompt of a chat without tools, as `prompt` makes it."""
        return self.prompt(Chat(tuple(messages)), day=day).ids

    def prompt(
        self,
        chat: Chat,
        beginnings: Sequence[Chat] = (),
        *,
        day: dt.date | None = None,
        memory: RunMemory | None = None,
    ) -> ChatPrompt:
        """The prompt of a chat, open for the assistant's answer.

        `beginnings` are chats that begin as this one does; one that the template does not take
        shares nothing. `day` is for templates that write the date; without it they fall back
        or refuse. What `memory` knows is not encoded again. Raises TextRefusedError;
        TemplateRefusedError when it is the template that refuses.
        """
        rendered = self._render(chat, day)
        runs = self._runs(rendered, memory)
        shared = tuple(self._shared(rendered.text, runs, each, day) for each in beginnings)
        return ChatPrompt(list(chain.from_iterable(run.ids for run in runs)), shared)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How this model writes tool calls."""
        source = None if self._template is None else self._template.source
        return tool_format(source, takes_tools=self._style.calls is not None)

    def plain_ids(self, text: str) -> list[int]:
        """The prompt of a completion: the text, after the model's own start token if it has one.

        Raises TextRefusedError.
        """
        return self._prefix_ids + self._encode_runs([text])[0]

    def inner_ids(self, text: str) -> list[int]:
        """A text's ids as they stand within another. Raises TextRefusedError."""
        return self._encode_runs([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; broken UTF-8 becomes U+FFFD.

        Control tokens are silent, but for the marks of tool calls.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:  # noqa: A002 - the field's own word
        """What one token adds to the text: b"" for those that add nothing, see `decode`."""
        return self._bytes[id] if 0 <= id < len(self._bytes) else b""

    @cached_property
    def _style(self) -> ToolStyle:
        if self._template is None:
            return ToolStyle(None, several=True, system=True)
        return tool_style(self._template)

    def _render(self, chat: Chat, day: dt.date | None) -> Rendered:
        told = self._told(chat)
        plain = self._write(told, day)
        mark = choose_mark([plain, *told.texts()])
        marked = told.mapped(lambda text: self._control.mark(text, mark))
        if marked == told:
            return Rendered(plain)
        rendered = unmark(self._write(marked, day), mark)
        if rendered.text != plain:
            raise TemplateRefusedError(
                "the messages hold characters of control tokens, and this model's chat template "
                "rewrites content in a way that loses track of them"
            )
        return rendered

    def _told(self, chat: Chat) -> Chat:
        """The chat as the template can take it."""
        if not chat.has_tools:
            return chat
        if self._style.calls is None:
            return spelled(chat, system=self._style.system)
        return chat if self._style.several else chat.one_call_at_a_time()

    def _write(self, chat: Chat, day: dt.date | None) -> str:
        if self._template is None:
            raise TemplateRefusedError("this model has no chat template; use plain completions")
        style = self._style.calls if chat.has_tools else None
        return self._template.render(
            chat.messages, day, tools=chat.tools, style=style or PLAIN_STYLE
        )

    def _shared(self, text: str, runs: Sequence[_Run], beginning: Chat, day: dt.date | None) -> int:
        try:
            other = self._write(self._told(beginning), day)
        except TemplateRefusedError:
            return 0
        same = _same_chars(text, other)
        tokens = 0
        for run in runs:
            if run.end <= same:
                tokens += len(run.ids)
                continue
            if not run.control and run.start < same:
                tokenizer = self._inner if run.start else self._tokenizer
                (cut,) = self._encode(tokenizer, [text[run.start : same]])
                tokens += _same_ids(run.ids, cut)
            break
        return tokens

    def _runs(self, rendered: Rendered, memory: RunMemory | None) -> list[_Run]:
        matches = list(self._control.find(rendered))
        starts = [0, *(match.end for match in matches)]
        ends = [*(match.start for match in matches), len(rendered.text)]
        bounds = list(zip(starts, ends, strict=True))
        texts = [rendered.text[start:end] for start, end in bounds]
        encoded = self._encode_runs(texts) if memory is None else self._recall_runs(texts, memory)
        runs = []
        for (start, end), ids, match in zip_longest(bounds, encoded, matches):
            runs.append(_Run(start, end, ids, control=False))
            if match is not None:
                runs.append(_Run(match.start, match.end, (match.id,), control=True))
        return runs

    def _recall_runs(self, runs: list[str], memory: RunMemory) -> list[Sequence[int]]:
        """The same ids as `_encode_runs`', with only those encoded that are not remembered."""
        found = [memory.recall(first=not at, run=run) for at, run in enumerate(runs)]
        new = [at for at, ids in enumerate(found) if ids is None]
        if new:
            encoded = self._encode_runs([runs[at] for at in new], from_start=found[0] is None)
            for at, ids in zip(new, encoded, strict=True):
                memory.keep(ids, first=not at, run=runs[at])
                found[at] = ids
        return [ids for ids in found if ids is not None]

    def _encode_runs(self, runs: list[str], *, from_start: bool = True) -> list[list[int]]:
        """Ids of runs of plain text, the first of them a prompt's own where it is `from_start`.

        A control id cannot come out.
        """
        first = runs[:1] if from_start else []
        try:
            ids = [
                self._encode(self._tokenizer, first),
                self._encode(self._inner, runs[len(first) :]),
            ]
        except TypeError as error:  # the library's word for a lone surrogate
            raise TextRefusedError("the text is not valid Unicode") from error
        encoded = [*ids[0], *ids[1]]
        if any(not self._control.ids.isdisjoint(run) for run in encoded):
            raise TextRefusedError("the text spells a control token in this model's vocabulary")
        return encoded

    def _encode(self, tokenizer: Tokenizer, runs: list[str]) -> list[list[int]]:
        # The batch form, because it alone releases the GIL. A batch of several is shared out
        # to threads, which costs more than a short one takes.
        short = sum(map(len, runs)) <= INLINE_CHARS
        batches = [[run] for run in runs] if short else [runs]
        return [
            encoding.ids
            for batch in batches
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ]


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


def _same_chars(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same_ids(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)
