"""From files on disk to an engine that has already generated: loading, then warming.

Takes seconds and all cores, so it runs in a thread while the server already answers probes.
"""

import logging
import time
from pathlib import Path

import msgspec
import torch

from artifacts.errors import UnknownModelError
from artifacts.store import ModelStore
from core.registry import deployment_name
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.runner import load_runner
from worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


def resolved(settings: WorkerSettings) -> WorkerSettings:
    """The settings with the version's hash for its name, and the deployment filled in.

    Raises ArtifactError.
    """
    manifest = ModelStore(Path(settings.models_dir)).find(settings.model_version)
    if manifest is None:
        raise UnknownModelError(f"{settings.model_version} is not in {settings.models_dir}")
    deployment = settings.deployment or deployment_name(manifest.name, manifest.version)
    return msgspec.structs.replace(settings, model_version=manifest.version, deployment=deployment)


def load_engine(settings: WorkerSettings, boot_id: str) -> Engine:
    """Load the version's weights and text rules, warm the runner, build the engine.

    Raises ArtifactError for missing or damaged files, UnsupportedModelError for a model we
    cannot run.
    """
    started = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    store = ModelStore(Path(settings.models_dir))
    directory = store.directory(settings.model_version)
    manifest = store.find(settings.model_version)
    assert manifest is not None
    text = TextRules.load(directory)
    runner = load_runner(
        directory,
        block_tokens=settings.block_tokens,
        kv_blocks=settings.kv_blocks,
        kv_memory_bytes=settings.kv_memory_mb * 1024 * 1024,
        dtype=manifest.compute_dtype,  # a part of the version, so not a setting
    )
    runner.warm_up(tokens=settings.max_batched_tokens)
    config = EngineConfig(
        version=settings.model_version,
        boot_id=boot_id,
        kv_blocks=runner.kv_blocks,
        block_tokens=runner.block_tokens,
        max_batched_tokens=settings.max_batched_tokens,
        max_sequences=settings.max_sequences,
        context_tokens=text.context_tokens,
    )
    _log.info(
        "model is loaded",
        extra={
            "facts": {
                "seconds": round(time.monotonic() - started, 1),
                "dtype": str(runner.dtype),
                "kv_blocks": runner.kv_blocks,
            }
        },
    )
    return Engine(runner=runner, text=text, config=config)
