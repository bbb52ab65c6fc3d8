"""What both dialects parse into and render from: one request, its events, its answer.

A dialect turns a body into a `Conversation` and stream events into bytes; everything between
(routing, counting, metering, the worker) sees only these types. Nothing here knows a dialect.

    Opened more* Done      every choice ends exactly once
    [Opened more*] Broke   an error; nothing follows it
    more: Delta | ThoughtDelta | CallStart | CallDelta | ChoiceEnd
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import msgspec

from core.errors import Refusal
from core.protocol import Grammar, ServiceClass, Usage
from gateway.bill import Bill
from gateway.images import Image
from gateway.items import Ask
from gateway.thinking import Thinking, Thought
from gateway.toolbox import Toolbox, ToolCall

SEED_MODULUS = 2**63  # `Sampling.seed` holds 0 <= seed < SEED_MODULUS

Dialect = Literal["openai", "anthropic"]
Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "filtered", "tool_calls"]
CacheTTL = Literal["5m", "1h"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat. An assistant's may have `calls` and then say nothing.

    It may also have thoughts, each at its place among the text and the calls.

    A tool's is the result of the call `call_id` of the tool `tool`, and may be empty. A user's and
    a tool's may have images, each at its place in the text.
    """

    role: Role
    content: str
    images: tuple[Image, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    call_id: str = ""
    tool: str = ""


class CacheBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A place up to which the caller wants its prompt kept.

    It is after the first `turns` turns, of the last of them only so many characters, images and
    calls. With no `turns` it is after the first `tools` tools.
    """

    ttl: CacheTTL
    tools: int = 0
    turns: int = 0
    chars: int = 0
    images: int = 0
    calls: int = 0


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is well formed; whether it fits the model is for the relay to say.

    A `chat` has `turns` and an empty prompt; a `text` has a prompt, as text or as token ids,
    and no turns.
    """

    dialect: Dialect
    kind: Literal["chat", "text"]
    model: str  # public name, not yet looked up
    turns: tuple[Turn, ...] = ()
    toolbox: Toolbox | None = None
    thinking: Thinking | None = None  # None: nothing is said of it
    cache_breaks: tuple[CacheBreak, ...] = ()  # in the order of the prompt
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None  # output tokens of each choice; None: what the model allows
    # None: the client left it out, and the model's own default holds.
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 is off
    seed: int | None = None  # 0 <= seed < 2**63; None: the gateway draws one
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None: none; n: the chosen token and the n likeliest
    n: int = 1
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    echo: bool = False  # a text's answers begin with its prompt
    grammar: Grammar | None = None
    grammar_param: str = ""  # the field that asked for it
    stream: bool = False
    include_usage: bool = False  # a usage chunk at the end of an OpenAI stream
    running_usage: bool = False  # and what there is of it so far in every chunk, as vLLM does
    service_class: ServiceClass = "standard"
    tier_asked: bool = False  # whether the caller named a tier, and is told the one it got
    user: str | None = None  # the caller's own name for its end user
    metadata: tuple[tuple[str, str], ...] = ()  # names and texts of the caller's own
    cache_key: str | None = None  # `prompt_cache_key`: names the conversation for routing
    ask: Ask | None = None  # of the Responses API alone
    deadline_s: float | None = None  # the body's `timeout`, of the whole answer

    @property
    def images(self) -> Iterator[Image]:
        """All of them, in the order of the turns."""
        for turn in self.turns:
            yield from turn.images


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token's bytes, its natural logarithm of probability, and the likeliest."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class PromptToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the prompt, and what was likeliest in its place.

    The first has no logprob: nothing comes before it.
    """

    id: int
    token: bytes
    logprob: float | None = None
    top: tuple[tuple[int, bytes, float], ...] = ()


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has started. `cached_tokens` are part of `prompt_tokens`.

    `prompt` is given only if logprobs of it were asked for, `echo` only if its text was.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    prompt: tuple[PromptToken, ...] = ()
    echo: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """More of one choice. `chances` are given only if the conversation asked for logprobs."""

    choice: int
    text: str
    chances: tuple[TokenChance, ...] = ()


class ThoughtDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of what one choice thinks: text, the signature that ends it, or a whole one sealed."""

    choice: int
    text: str = ""
    signature: str = ""
    redacted: str = ""


class CallStart(msgspec.Struct, frozen=True, kw_only=True):
    """A tool is called; `call` counts the calls of its choice from 0."""

    choice: int
    call: int
    name: str


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of the arguments of the call that began last: the next characters of JSON."""

    choice: int
    call: int
    arguments: str


class ChoiceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """No more of this choice. `stop` is the stop string that matched, if one did."""

    choice: int
    finish: Finish
    stop: str | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """All choices ended; totals over all of them and all attempts."""

    usage: Usage
    bill: Bill | None = None  # None: not known


class Broke(msgspec.Struct, frozen=True, kw_only=True):
    """The answer ends here, unfinished."""

    refusal: Refusal


StreamEvent = Opened | Delta | ThoughtDelta | CallStart | CallDelta | ChoiceEnd | Done | Broke


def told_event(event: StreamEvent, conversation: Conversation) -> StreamEvent | None:
    """An event as its caller hears it: of thinking, only who is to hear it does.

    Anthropic's callers are those who asked; OpenAI's, all who did not ask for none. One who wants
    it omitted is told what is needed to send it back.
    """
    if not isinstance(event, ThoughtDelta):
        return event
    thinking = conversation.thinking
    mode = "unsaid" if thinking is None else thinking.mode
    if mode == "off" or (mode == "unsaid" and conversation.dialect == "anthropic"):
        return None
    if thinking is not None and thinking.display == "omitted":
        event = msgspec.structs.replace(event, text="")
        return event if event.signature or event.redacted else None
    return event


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, after the first `at` characters of its choice's text.

    `arguments` are JSON, unless the answer was cut off in them.
    """

    name: str
    arguments: str
    at: int


class AnswerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice. `chances` is None when no logprobs were asked for."""

    index: int
    text: str
    finish: Finish
    calls: tuple[AnswerCall, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    stop: str | None = None
    chances: tuple[TokenChance, ...] | None = None


def told_between(choice: AnswerChoice) -> Iterator[Thought | AnswerCall]:
    """What interrupts the text of a choice, in the order in which it was told."""
    thoughts = list(choice.thoughts)
    for number, call in enumerate(choice.calls):
        while thoughts and thoughts[0].calls <= number:
            yield thoughts.pop(0)
        yield call
    yield from thoughts


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, for a caller that does not stream; choices in index order."""

    choices: tuple[AnswerChoice, ...]
    usage: Usage
    bill: Bill | None = None
    opened: Opened = Opened(prompt_tokens=0)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may know of a served model."""

    id: str  # public name
    created_ms: int
    context_tokens: int
    output_tokens_max: int


class StreamWriter(ABC):
    """Turns one answer's events into the bytes of its dialect's event stream.

    Events come in the order of this module's grammar; out of it is a broken contract and
    asserts. Any method may return no bytes. One writer serves one answer. `produced` is how many
    tokens the engine has produced as of the event that is written next; whoever writes sets it.
    """

    produced = 0

    @abstractmethod
    def open(self, event: Opened) -> bytes:
        """The stream's head."""

    @abstractmethod
    def delta(self, event: Delta) -> bytes:
        """More text."""

    def thought(self, event: ThoughtDelta) -> bytes:
        """More thinking. Only where the interface has any."""
        raise AssertionError(event)

    def call(self, event: CallStart) -> bytes:
        """A tool is called. Only where the interface has tools."""
        raise AssertionError(event)

    def arguments(self, event: CallDelta) -> bytes:
        """More of a call. Only where the interface has tools."""
        raise AssertionError(event)

    @abstractmethod
    def end(self, event: ChoiceEnd) -> bytes:
        """A choice is over."""

    @abstractmethod
    def done(self, event: Done) -> bytes:
        """The stream's tail, its terminator included."""

    @abstractmethod
    def broke(self, event: Broke) -> bytes:
        """An error as an event; nothing may follow it."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Bytes that mean nothing to the reader, between any two events."""

    def write(self, event: StreamEvent) -> bytes:
        """The frames of any event."""
        match event:
            case Delta():
                frames = self.delta(event)
            case ThoughtDelta():
                frames = self.thought(event)
            case CallDelta():
                frames = self.arguments(event)
            case CallStart():
                frames = self.call(event)
            case ChoiceEnd():
                frames = self.end(event)
            case Opened():
                frames = self.open(event)
            case Done():
                frames = self.done(event)
            case _:
                frames = self.broke(event)
        return frames
