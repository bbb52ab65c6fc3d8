"""From files on disk to a model that has already run its largest steps, and knows its pool.

Takes seconds and all cores, so it runs in a thread while the server already answers probes.
What does not fit is refused before it is taken, with the sum (docs/operations.md).
"""

import logging
import time
from pathlib import Path

import msgspec
import torch

from artifacts.errors import UnknownModelError
from artifacts.manifest import Manifest
from artifacts.store import ModelStore
from core.registry import deployment_name
from text.grammar import Grammars
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.grammar import CompiledGrammars, GrammarMasks
from worker.machine import HostMemory, Memory, cores, trim
from worker.memory import (
    Demand,
    DoesNotFitError,
    Wanted,
    check_weights,
    mask_demand,
    size_pool,
    sum_told,
)
from worker.runner import ModelRunner, compute_dtype, load_runner
from worker.sampler import Sampler
from worker.serving import Observer
from worker.settings import WorkerSettings
from worker.warm_up import largest_steps
from worker.weights import count_weights

_log = logging.getLogger(__name__)


def resolved(settings: WorkerSettings) -> WorkerSettings:
    """The settings with the version's hash for its name, and the deployment filled in.

    Raises ArtifactError.
    """
    manifest = _manifest(settings)
    deployment = settings.deployment or deployment_name(manifest.name, manifest.version)
    return msgspec.structs.replace(settings, model_version=manifest.version, deployment=deployment)


def load_model(settings: WorkerSettings, memory: Memory | None = None) -> "LoadedModel":
    """Load the version's weights and text rules, run the largest steps, size the pool.

    Raises:
        ArtifactError: missing or damaged files.
        UnsupportedModelError: a model we cannot run.
        DoesNotFitError: more memory is needed than there is.
    """
    started = time.monotonic()
    memory = memory or HostMemory()
    torch.set_num_threads(settings.threads or cores())
    directory = ModelStore(Path(settings.models_dir)).directory(settings.model_version)
    dtype = _manifest(settings).compute_dtype  # a part of the version, so not a setting
    try:
        check_weights(memory.bounds(), count_weights(directory) * compute_dtype(dtype).itemsize)
        text = TextRules.load(directory)
        grammars = CompiledGrammars(Grammars(text))
        sampler = Sampler(
            settings.max_sequences,
            vocab_size=text.vocab_size,
            eos_ids=text.eos_ids,
            masks=GrammarMasks(grammars),
        )
        runner = load_runner(
            directory,
            block_tokens=settings.block_tokens,
            kv_blocks=1,
            dtype=dtype,
            batch_invariant=settings.batch_invariant,
            sampler=sampler,
        )
        step_bytes = memory.peak_of(lambda: _run_largest_steps(runner, settings))
    except (MemoryError, RuntimeError) as error:
        _refuse_if_short(error, memory, "the model and a largest step")
        raise
    model = LoadedModel(settings, memory, runner, text, grammars, step_bytes=step_bytes)
    facts = {
        "seconds": round(time.monotonic() - started, 1),
        "dtype": str(runner.dtype),
        "threads": torch.get_num_threads(),
        "kv_blocks": model.kv_blocks,
        "kv_bytes": model.kv_blocks * runner.block_bytes,
        "step_bytes": step_bytes,
        "bounds": [bound.name for bound in memory.bounds()],
    }
    _log.info("model is loaded", extra={"facts": facts})
    return model


class LoadedModel:
    """One version's weights and text rules, and the size of its pool."""

    def __init__(
        self,
        settings: WorkerSettings,
        memory: Memory,
        runner: ModelRunner,
        text: TextRules,
        grammars: CompiledGrammars,
        *,
        step_bytes: int,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._runner = runner
        self._text = text
        self._grammars = grammars
        host_bytes = settings.host_memory_mb * 1024 * 1024
        self._host_blocks = host_bytes // runner.block_bytes
        self._demands = (
            Demand(purpose="for a largest step", size=step_bytes),
            Demand(purpose="for KV in host memory", size=host_bytes),
            mask_demand(sequences=settings.max_sequences, vocab_size=runner.config.vocab_size),
        )
        self._runner.resize(0)
        self.kv_blocks = self._sized(
            Wanted(
                blocks=settings.kv_blocks,
                size=settings.kv_memory_mb * 1024 * 1024,
                share=settings.kv_memory_share,
            )
        )

    def open(self, boot_id: str, observer: Observer) -> Engine:
        """Take the pool, and build an engine that has seen nothing. Raises DoesNotFitError.

        The size stays what it was at first: it is what the fleet was told.
        """
        self._sized(Wanted(blocks=self.kv_blocks))
        try:
            self._runner.resize(self.kv_blocks, self._host_blocks)
        except (MemoryError, RuntimeError) as error:
            _refuse_if_short(error, self._memory, "the KV pool")
            raise
        settings = self._settings
        config = EngineConfig(
            version=settings.model_version,
            boot_id=boot_id,
            kv_blocks=self.kv_blocks,
            block_tokens=settings.block_tokens,
            max_batched_tokens=settings.max_batched_tokens,
            max_sequences=settings.max_sequences,
            waiting_tokens_max=settings.waiting_tokens_max,
            itl_target_ms=settings.itl_target_ms,
            itl_stretch=settings.itl_stretch,
            host_blocks=self._host_blocks,
            context_tokens=self._text.context_tokens,
        )
        self._grammars.on_compile = observer.grammar
        return Engine(
            runner=self._runner,
            text=self._text,
            config=config,
            compile_grammar=self._grammars.get,
            step_timeout_s=settings.step_timeout_s,
            on_step=observer.step,
        )

    def close(self) -> None:
        """Give the pool back; no engine may use it any more. The weights stay."""
        self._runner.resize(0)
        trim()

    def _sized(self, wanted: Wanted) -> int:
        settings = self._settings
        step_tokens = min(settings.max_batched_tokens, self._text.context_tokens)
        return size_pool(
            self._memory.bounds(),
            self._demands,
            wanted=wanted,
            block_bytes=self._runner.block_bytes,
            least_blocks=-(-step_tokens // settings.block_tokens),
        )


def _manifest(settings: WorkerSettings) -> Manifest:
    manifest = ModelStore(Path(settings.models_dir)).find(settings.model_version)
    if manifest is None:
        raise UnknownModelError(f"{settings.model_version} is not in {settings.models_dir}")
    return manifest


def _run_largest_steps(runner: ModelRunner, settings: WorkerSettings) -> None:
    # They also start threads, read every weight and have oneDNN compile its loops; no caller
    # should wait for that.
    for plan in largest_steps(
        batched_tokens=settings.max_batched_tokens,
        sequences=settings.max_sequences,
        context_tokens=runner.config.context_tokens,
        block_tokens=settings.block_tokens,
    ):
        runner.execute(plan)


def _refuse_if_short(error: Exception, memory: Memory, what: str) -> None:
    """Raises DoesNotFitError where `error` is torch's way to say that there is no memory."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        told = sum_told(memory.bounds())
        raise DoesNotFitError(f"{what} took more memory than there is: {told}.") from error
