"""An engine over a real model, grammars included, and answers read to their end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.protocol import Failed, Finished, Generate
from tests.support.engine_listener import WAIT_S, Listener
from tests.support.engine_requests import VERSION
from text.grammar import Grammars
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.grammar import CompiledGrammars, GrammarMasks
from worker.runner import load_runner
from worker.sampler import Sampler

ANSWERS_S = 1_200  # many answers of a real model, on a machine that does other things as well


@contextmanager
def a_model_engine(directory: Path, *, dtype: str = "float32", **changes) -> Iterator[Engine]:
    """Started, and at the end stopped, empty and in order."""
    text = TextRules.load(directory)
    defaults = {"kv_blocks": 400, "block_tokens": 4, "max_batched_tokens": 64, "max_sequences": 16}
    defaults |= {"context_tokens": text.context_tokens, "waiting_tokens_max": 1_000_000}
    config = EngineConfig(version=VERSION, boot_id="boot", **(defaults | changes))
    grammars = CompiledGrammars(Grammars(text))
    runner = load_runner(
        directory,
        block_tokens=config.block_tokens,
        kv_blocks=config.kv_blocks,
        dtype=dtype,
        sampler=Sampler(
            config.max_sequences,
            vocab_size=text.vocab_size,
            eos_ids=text.eos_ids,
            masks=GrammarMasks(grammars),
        ),
    )
    engine = Engine(runner=runner, text=text, config=config, compile_grammar=grammars.get)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(WAIT_S)
    assert engine.load().integrity
    assert engine.load().kv_blocks_in_use == 0


def submitted(engine: Engine, *requests: Generate) -> list[Listener]:
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        assert engine.submit(request, listener.emit) is None
    return listeners


def answered(engine: Engine, *requests: Generate) -> list[Listener]:
    """Each heard to its end, complete or failed."""
    listeners = submitted(engine, *requests)
    for listener in listeners:
        with listener._changed:
            assert listener._changed.wait_for(lambda heard=listener: _ended(heard), ANSWERS_S)
        listener.end()
    return listeners


def _ended(listener: Listener) -> bool:
    return bool(listener.events) and isinstance(listener.events[-1], Finished | Failed)


def text_of(listener: Listener, choice: int = 0) -> str:
    return "".join(tokens.text for tokens in listener.tokens(choice))


def finish_of(listener: Listener, choice: int = 0) -> str | None:
    return listener.tokens(choice)[-1].finish
