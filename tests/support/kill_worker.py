"""A worker whose model is a hash: the real process, server, engine, journal and link otherwise.

A token is a letter, drawn from the request's seed, the choice and the position alone: whoever
knows the seed can tell whether an answer is whole, however many attempts made it.
"""

import asyncio
import os
import time
import zlib
from pathlib import Path

import uvicorn
import uvloop

from artifacts.store import ModelStore
from core import ids, log
from core.settings import read_settings
from tests.support.fake_runner import logprob_of
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.process import Worker
from worker.serving import Observer
from worker.settings import WorkerSettings, checked
from worker.step import Draw, Opening, Sampled, StepPlan, StepResult

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DECODE_S = 0.008  # one step of whatever runs
PREFILL_S = 0.006  # more, for a step that reads a prompt
LENGTH_MAX = 48  # of an answer that ends by itself


def letter(seed: int, choice: int, index: int) -> str:
    """The token at a position of an answer."""
    return LETTERS[_mixed(seed, choice, index) % len(LETTERS)]


def length(seed: int, choice: int) -> int:
    """After how many letters an answer ends by itself."""
    return 1 + _mixed(seed, choice, -1) % LENGTH_MAX


def _mixed(seed: int, choice: int, index: int) -> int:
    return zlib.crc32(f"{seed} {choice} {index}".encode())


class LetterRunner:
    """Implements `worker.step.Runner` at the pace of a small model, without computing."""

    def __init__(self, rules: TextRules) -> None:
        self._ids = [rules.plain_ids(one)[-1] for one in LETTERS]
        self._eos = min(rules.eos_ids)
        self._slots: dict[int, Opening] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        prefills = any(len(row.token_ids) > 1 for row in plan.rows)
        time.sleep(DECODE_S + PREFILL_S * prefills)
        return StepResult(sampled=tuple(self._draw(row.draw) for row in plan.rows if row.draw))

    def _draw(self, draw: Draw) -> Sampled:
        if draw.opening is not None:
            self._slots[draw.slot] = draw.opening
        opening = self._slots[draw.slot]
        seed, choice, logprobs = opening.sampling.seed, opening.choice, opening.sampling.logprobs
        token_id = self._eos
        if draw.index < length(seed, choice):
            token_id = self._ids[LETTERS.index(letter(seed, choice, draw.index))]
        logprob = None if logprobs is None else logprob_of(token_id, logprobs)
        return Sampled(token_id=token_id, logprob=logprob)


class LetterModel:
    """As `worker.startup.LoadedModel`, but for the weights."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        directory = ModelStore(Path(settings.models_dir)).directory(settings.model_version)
        self._rules = TextRules.load(directory)

    def open(self, boot_id: str, observer: Observer) -> Engine:
        settings, rules = self._settings, self._rules
        config = EngineConfig(
            version=settings.model_version,
            boot_id=boot_id,
            kv_blocks=settings.kv_blocks,
            block_tokens=settings.block_tokens,
            max_batched_tokens=settings.max_batched_tokens,
            max_sequences=settings.max_sequences,
            context_tokens=rules.context_tokens,
        )
        return Engine(runner=LetterRunner(rules), text=rules, config=config, on_step=observer.step)

    def close(self) -> None:
        """There is no pool."""


def main() -> int:
    """As `worker.__main__.main`, whose own module needs torch."""
    settings = checked(read_settings(WorkerSettings, os.environ))
    log.configure("worker", settings.log_level)
    boot_id = ids.boot_id(os.urandom(ids.ENTROPY_BYTES))
    worker = Worker(settings, boot_id=boot_id, load=LetterModel)
    server = uvicorn.Server(
        uvicorn.Config(
            worker.server,
            host=settings.worker_host,
            port=settings.worker_port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,
        )
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(worker.run(server))
