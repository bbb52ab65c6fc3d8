"""Token frames into channel events, and the count of them: the client's side of a generation.

Ids may come before the text they belong to; their number then rides on the next event, so
that what was delivered can be counted where it is written. Where tools may be called, text is
read for calls: what a parser holds back belongs to the choice, whichever attempt continues it.
"""

import asyncio

import msgspec

from core.protocol import Prompted, Tokens
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    Finish,
    Opened,
    StreamEvent,
    TokenChance,
)
from gateway.metrics import Metrics
from gateway.relay.answer import AnswerSoFar
from gateway.relay.channel import Channel
from gateway.relay.prompt import PromptSoFar
from gateway.tools.cursor import Argued, Called, Said
from gateway.tools.parser import CallParser
from gateway.tools.plan import ToolPlan
from text.rules import TextRules


class Times(msgspec.Struct):
    """Moments on the loop's clock, in seconds; 0 is not yet."""

    armed_s: float = 0.0
    placed_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


class Delivery:
    """One answer on its way to its channel. `rules` are given when logprobs are wanted."""

    def __init__(
        self,
        channel: Channel,
        *,
        choices: int,
        rules: TextRules | None,
        tools: ToolPlan | None,
        metrics: Metrics,
        prompt: PromptSoFar | None = None,
        echo: str = "",
    ) -> None:
        self._channel = channel
        self._rules = rules
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self._parsers = [] if tools is None else [tools.parser() for _ in range(choices)]
        self._prompt = prompt
        self._echo = echo
        self._opened = False
        self._opening = Opened(prompt_tokens=0)
        self.untold_tokens = 0
        self.answer = AnswerSoFar(choices)
        self.times = Times()

    def open(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has started; later attempts do not open the answer again.

        One that tells of its prompt opens when all of that is there.
        """
        if not self._opened:
            self._opening = Opened(
                prompt_tokens=prompt_tokens,
                cached_tokens=min(cached_tokens, prompt_tokens),
                echo=self._echo,
            )
            self._open()

    def prompted(self, frame: Prompted) -> bool:
        """Logprobs of the prompt; false for those that are not of this one."""
        if self._prompt is None or not self._prompt.take(frame):
            return False
        if not self._opened:
            self._open()
        return True

    def take(self, frame: Tokens) -> bool:
        """Pass a frame on; false for one about a choice that is not open."""
        if not self._opened or not self.answer.take(frame):
            return False
        self.count(len(frame.ids))
        chances = self._chances(frame)
        if self._parsers:
            self._parse(frame, chances)
        elif frame.text or chances:
            self._push(Delta(choice=frame.choice, text=frame.text, chances=chances))
        if frame.finish is not None:
            self._end(frame.choice, frame.finish, frame.stop)
        return True

    def end_open_choices(self) -> None:
        """Close what is open for want of room."""
        for index in self.answer.open():
            if self._parsers:
                self._tell(index, self._parsers[index], "", final=True)
            self._end(index, "length", None)

    def count(self, tokens: int) -> None:
        """Note that the engine produced tokens, passed on or not."""
        if not tokens:
            return
        self.untold_tokens += tokens
        now_s = self._clock()
        if self.times.first_token_s:
            self._metrics.inter_token_s.observe((now_s - self.times.last_token_s) / tokens)
        else:
            self.times.first_token_s = now_s
        self.times.last_token_s = now_s

    def _end(self, choice: int, finish: Finish, stop: str | None) -> None:
        if finish == "stop" and self._parsers and self._parsers[choice].called:
            finish, stop = "tool_calls", None
        self._push(ChoiceEnd(choice=choice, finish=finish, stop=stop))

    def _parse(self, frame: Tokens, chances: tuple[TokenChance, ...]) -> None:
        if chances:  # of the tokens alone: their text may be held, or be no text
            self._push(Delta(choice=frame.choice, text="", chances=chances))
        parser, final = self._parsers[frame.choice], frame.finish is not None
        self._tell(frame.choice, parser, frame.text, final=final)

    def _tell(self, choice: int, parser: CallParser, text: str, *, final: bool) -> None:
        for piece in parser.feed(text, final=final):
            match piece:
                case Said(text=said):
                    self._push(Delta(choice=choice, text=said))
                case Called(index=call, name=name):
                    self._push(CallStart(choice=choice, call=call, name=name))
                case Argued(index=call, text=more):
                    self._push(CallDelta(choice=choice, call=call, arguments=more))

    def _push(self, event: StreamEvent) -> None:
        self._channel.push(event, self._told())

    def _open(self) -> None:
        prompt = self._prompt
        if prompt is None:
            self._opened = True
            self._channel.push(self._opening)
        elif prompt.whole:
            self._opened = True
            self._channel.push(msgspec.structs.replace(self._opening, prompt=prompt.tokens))

    def _told(self) -> int:
        told, self.untold_tokens = self.untold_tokens, 0
        return told

    def _chances(self, frame: Tokens) -> tuple[TokenChance, ...]:
        if self._rules is None:
            return ()
        token_bytes = self._rules.token_bytes
        return tuple(
            TokenChance(
                token=token_bytes(chance.id),
                logprob=chance.logprob,
                top=tuple((token_bytes(i), logprob) for i, logprob in chance.top),
            )
            for chance in frame.logprobs or ()
        )
