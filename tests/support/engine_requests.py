"""Builders with defaults for the engine's tests: requests, sequences, drawing, and a text."""

from collections.abc import Sequence as Sequence_
from itertools import count

from core.protocol import CacheMark, Choice, Generate, Sampling, ServiceClass
from tests.support.fake_runner import VOCAB_SIZE
from worker.prefix import chain_root
from worker.sequence import Sequence

EOS = 0
VERSION = "v1"

_numbers = count(1)


class FakeText:
    """Token 0 ends an answer, 1 to 256 are the bytes, the rest are longer pieces of text.

    The bytes are mostly not UTF-8 of anything; the pieces cut characters in the middle.
    """

    eos_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE

    def __init__(self, pieces: Sequence_[bytes] | None = None) -> None:
        cuts = "한국어 🤦🏽‍♂️ naïve the end".encode()
        self._bytes = [b"", *(bytes([byte]) for byte in range(256))]
        self._bytes += pieces or [cuts[i : i + 1 + i % 5] for i in range(VOCAB_SIZE - 257)]
        self._bytes += [b"."] * (VOCAB_SIZE - len(self._bytes))

    def token_bytes(self, id: int, /) -> bytes:  # noqa: A002 - the product's name
        return self._bytes[id]

    def decode(self, ids: Sequence_[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")


def a_sampling(**changes) -> Sampling:
    return Sampling(**({"seed": 7, "max_tokens": 8, "temperature": 0.0} | changes))


def a_sequence(
    prompt: Sequence_[int] = (1, 2, 3),
    *,
    outputs: Sequence_[int] = (),
    request: str | None = None,
    choice: int = 0,
    salt: bytes = b"",
    service_class: ServiceClass = "standard",
    deadline_ms: int = 0,
    context_tokens: int = 1 << 20,
    tells_prompt: bool = False,
    marks: Sequence_[CacheMark] = (),
    **sampling,
) -> Sequence:
    number = next(_numbers)
    return Sequence(
        number=number,
        request=request or f"request {number}",
        choice=choice,
        prompt_ids=tuple(prompt),
        output_ids=tuple(outputs),
        sampling=a_sampling(**sampling),
        root=chain_root(VERSION, "", salt),
        service_class=service_class,
        deadline_ms=deadline_ms,
        context_tokens=context_tokens,
        tells_prompt=tells_prompt,
        marks=tuple(marks),
    )


def a_request(
    prompt: Sequence_[int] = (1, 2, 3),
    *,
    request_id: str | None = None,
    attempt: int = 1,
    choices: Sequence_[Choice] = (Choice(index=0),),
    salt: bytes = b"salt",
    service_class: ServiceClass = "standard",
    deadline_ms: int = 0,
    version: str = VERSION,
    cache_marks: Sequence_[CacheMark] = (),
    **sampling,
) -> Generate:
    return Generate(
        request_id=request_id or f"req_{next(_numbers)}",
        attempt=attempt,
        version=version,
        prompt_ids=tuple(prompt),
        choices=tuple(choices),
        sampling=a_sampling(**sampling),
        tenant_salt=salt,
        service_class=service_class,
        deadline_ms=deadline_ms,
        cache_marks=tuple(cache_marks),
    )
