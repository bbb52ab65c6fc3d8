"""A worker without an engine: it speaks the worker's protocol and does what a test scripts.

Its tokens are a function of choice and position alone, so that an answer resumed elsewhere
must continue as it would have. `journal` holds what each attempt produced, whatever became of
its reader: the truth that metering is compared with.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from core.internal_token import verify
from core.protocol import (
    Failed,
    Finished,
    FinishReason,
    Frame,
    Generate,
    Load,
    Nack,
    Prompted,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
    decode_generate,
    encode_frame,
)
from tests.support.raw_server import FRAMES_HEAD, LAST_CHUNK, chunk, read_request, reset

Key = tuple[str, int]  # request id, attempt


def token_id(position: int) -> int:
    return 10 + position % 200


def token_text(choice: int, position: int) -> str:
    return f"w{choice}.{position} "


def whole_text(tokens: int, choice: int = 0) -> str:
    return "".join(token_text(choice, position) for position in range(tokens))


def prompt_logprob(id_: int, count: int) -> TokenLogprob:
    top = tuple((id_ + at, -1.0 - at) for at in range(count))
    return TokenLogprob(id=id_, logprob=-1.0, top=top)


@dataclass
class Run:
    """One attempt, as a behaviour sees it."""

    message: Generate
    worker: "ScriptedWorker"
    writer: asyncio.StreamWriter
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    produced: int = 0
    cached_tokens: int = 0
    started: bool = False
    ended: bool = False

    @property
    def usage(self) -> Usage:
        prompt = len(self.message.prompt_ids) if self.started else 0
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=min(prompt, self.cached_tokens),
            output_tokens=self.produced,
        )

    async def send(self, *frames: Frame) -> None:
        self.writer.write(b"".join(chunk(encode_frame(frame)) for frame in frames))
        await self.writer.drain()

    async def start(self) -> None:
        self.started = True
        await self.send(
            Started(
                boot_id=self.worker.boot_id,
                prompt_tokens=len(self.message.prompt_ids),
                cached_tokens=self.cached_tokens,
            )
        )

    async def tell_prompt(self, upto: int | None = None) -> None:
        """Logprobs of the prompt in two frames, or of its first tokens; not to who resumes."""
        count = self.message.sampling.prompt_logprobs
        if count is None or any(choice.output_ids for choice in self.message.choices):
            return
        told = [prompt_logprob(id_, count) for id_ in self.message.prompt_ids[1:upto]]
        await self.send(
            Prompted(start=1, logprobs=tuple(told[:2])), Prompted(start=3, logprobs=tuple(told[2:]))
        )

    async def finish(self, cause: str) -> None:
        self.ended = True
        await self.send(
            self.worker.load(),
            Finished(
                cause=cause,
                usage=self.usage,
                timings=Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0),
                journal_seq=1,
            ),
        )

    async def pause(self, seconds: float) -> bool:
        """Wait; whether an abort came meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.abort.wait()
        return self.abort.is_set()


Behaviour = Callable[[Run], Awaitable[None]] | int  # a number: only this HTTP status


def answers(tokens: int, *, gap_s: float = 0.0, delay_s: float = 0.0, cached: int = 0) -> Behaviour:
    """`tokens` of each choice, or `max_tokens`; then a stop, or a length."""

    async def behaviour(run: Run) -> None:
        run.cached_tokens = cached
        if await run.pause(delay_s):
            await run.finish("aborted")
            return
        await run.start()
        await run.tell_prompt()
        if await produce(run, tokens, gap_s):
            await run.finish("complete")
        else:
            await run.finish("aborted")

    return behaviour


async def produce(run: Run, tokens: int, gap_s: float, upto: int | None = None) -> bool:
    """The choices side by side, up to position `upto`; false when an abort came."""
    wants = run.message.sampling.logprobs is not None
    last = min(tokens, run.message.sampling.max_tokens)
    choices = {choice.index: choice for choice in run.message.choices}
    for position in range(min(len(c.output_ids) for c in choices.values()), last):
        if upto is not None and position >= upto:
            return True
        if gap_s and await run.pause(gap_s):
            return False
        if run.abort.is_set():
            return False
        for index, choice in choices.items():
            if position < len(choice.output_ids):
                continue
            text = token_text(index, position)
            if position == len(choice.output_ids):  # what was released before is not again
                whole = whole_text(position + 1, index)
                text = whole[choice.released_chars :]
            run.produced += 1
            await run.send(
                Tokens(
                    choice=index,
                    ids=(token_id(position),),
                    text=text,
                    logprobs=_logprobs(position) if wants else None,
                    finish=_finish(position, tokens, last),
                )
            )
        await asyncio.sleep(0)
    return True


def _finish(position: int, tokens: int, last: int) -> FinishReason | None:
    if position < last - 1:
        return None
    return "stop" if last == tokens else "length"


def _logprobs(position: int) -> tuple[TokenLogprob, ...]:
    top = ((token_id(position), -0.5), (token_id(position + 1), -1.5))
    return (TokenLogprob(id=token_id(position), logprob=-0.5, top=top),)


def says(*pieces: str, finish: FinishReason = "stop", dies_after: int | None = None) -> Behaviour:
    """These texts, one with each token of each choice; or some of them, and the end of the link."""

    async def behaviour(run: Run) -> None:
        await run.start()
        for choice in run.message.choices:
            begun = len(choice.output_ids)
            for position in range(begun, len(pieces)):
                if position == dies_after:
                    await asyncio.sleep(0.05)
                    run.ended = True
                    reset(run.writer)
                    return
                said = "".join(pieces[: position + 1])
                text = said[choice.released_chars :] if position == begun else pieces[position]
                last = position == len(pieces) - 1
                run.produced += 1
                ids = (token_id(position),)
                end = finish if last else None
                wants = run.message.sampling.logprobs is not None
                await run.send(
                    Tokens(
                        choice=choice.index,
                        ids=ids,
                        text=text,
                        logprobs=_logprobs(position) if wants else None,
                        finish=end,
                    )
                )
        await run.finish("complete")

    return behaviour


def refuses(reason: str = "full", *, fits_never: bool = False) -> Behaviour:
    async def behaviour(run: Run) -> None:
        run.ended = True
        await run.send(Nack(reason=reason, fits_never=fits_never), run.worker.load())

    return behaviour


def fails(
    *, retryable: bool, after: int | None = None, tokens: int = 100, code: str = "internal"
) -> Behaviour:
    """A Failed frame at once, or after some tokens."""

    async def behaviour(run: Run) -> None:
        if after is not None:
            await run.start()
            await produce(run, tokens, 0.0, after)
        run.ended = True
        await run.send(Failed(code=code, message="scripted", retryable=retryable, usage=run.usage))

    return behaviour


def dies(*, after: int | None, tokens: int = 100, gap_s: float = 0.0) -> Behaviour:
    """The connection is reset after some tokens; None: before it started."""

    async def behaviour(run: Run) -> None:
        if after is not None:
            await run.start()
            await produce(run, tokens, gap_s, after)
            await asyncio.sleep(0.05)
        run.ended = True
        reset(run.writer)

    return behaviour


def crashes(
    *, after: int | None = None, tokens: int = 100, back_s: float | None = None
) -> Behaviour:
    """The whole process is gone, as under a request that it dies of; back as another boot."""

    async def behaviour(run: Run) -> None:
        if after is not None:
            await run.start()
            await produce(run, tokens, 0.0, after)
            await asyncio.sleep(0.05)
        run.worker.crash(back_s)
        await asyncio.sleep(60)

    return behaviour


def hangs(*, after: int | None = None, tokens: int = 100) -> Behaviour:
    """Silent for good, also to aborts."""

    async def behaviour(run: Run) -> None:
        if after is not None:
            await run.start()
            await produce(run, tokens, 0.0, after)
        await asyncio.sleep(60)

    return behaviour


class ScriptedWorker:
    """Behaviours are used up in order; then `default` serves."""

    def __init__(self, secret: bytes, replica_id: str = "rep-0") -> None:
        self.secret = secret
        self.replica_id = replica_id
        self.boot_id = ""
        self.default: Behaviour = answers(5)
        self.script: list[Behaviour] = []
        self.requests: list[Generate] = []
        self.aborts: list[str] = []
        self.journal: dict[Key, Usage] = {}
        self.runs: dict[Key, Run] = {}
        self.arrived = asyncio.Event()
        self.crashing: asyncio.Task[None] | None = None
        self._port = 0
        self._load_seq = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self.boot_id = f"boot_{secrets.token_hex(12)}"
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As `kill -9`: every connection is reset, nothing listens."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def crash(self, back_s: float | None) -> None:
        """Killed from within one of its own requests, and started again after a time."""

        async def end() -> None:
            await self.kill()
            if back_s is not None:
                await asyncio.sleep(back_s)
                await self.start()

        self.crashing = asyncio.create_task(end())

    async def stop(self) -> None:
        if self.crashing is not None:
            await self.crashing
        if self._server is not None:
            await self.kill()

    def load(self) -> Load:
        self._load_seq += 1
        return Load(
            boot_id=self.boot_id,
            seq=self._load_seq,
            kv_blocks_total=1000,
            kv_blocks_free=1000 - len(self.runs),
            running=len(self.runs),
            waiting=0,
            placed_seq=max((m.placement for m in self.requests), default=0),
        )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head, body = await read_request(reader)
                self._authorise(head)
                path = head.split(b" ")[1].decode()
                if path == "/generate":
                    await self._generate(decode_generate(body), writer, reader)
                else:
                    await self._abort(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _authorise(self, head: bytes) -> None:
        token = head.split(b"authorization: Bearer ")[1].split(b"\r\n")[0].decode()
        assert verify(self.secret, token, audience="worker", now_ms=0) is not None

    async def _generate(
        self, message: Generate, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        self.requests.append(message)
        behaviour = self.script.pop(0) if self.script else self.default
        run = Run(message, self, writer)
        key = (message.request_id, message.attempt)
        self.runs[key] = run
        self.arrived.set()
        watcher = asyncio.create_task(self._watch(reader, run))
        try:
            if isinstance(behaviour, int):
                writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % behaviour)
                return
            writer.write(FRAMES_HEAD)
            await behaviour(run)
            writer.write(LAST_CHUNK)
            await writer.drain()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            self.journal[key] = run.usage
            del self.runs[key]

    async def _watch(self, reader: asyncio.StreamReader, run: Run) -> None:
        """The peer leaves: as a worker does, stop producing."""
        with suppress(ConnectionError):
            assert await reader.read(1) == b"", "one request at a time"
        run.abort.set()

    async def _abort(self, path: str, writer: asyncio.StreamWriter) -> None:
        name = path.removeprefix("/abort/")
        self.aborts.append(name)
        request_id, _, attempt = name.rpartition(":")
        run = self.runs.get((request_id, int(attempt)))
        if run is not None:
            run.abort.set()
        body = b'{"aborted":true}' if run is not None else b'{"aborted":false}'
        head = b"HTTP/1.1 200 OK\r\nx-headworks-boot: %s\r\n" % self.boot_id.encode()
        writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
