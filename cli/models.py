"""`headworks models`: pull a model version into the store, list what is there."""

import argparse
import threading
from collections.abc import Mapping
from pathlib import Path

from artifacts.errors import ArtifactError
from artifacts.manifest import ComputeDtype, Manifest
from artifacts.progress import Progress
from artifacts.pull import pull
from artifacts.store import ModelStore
from cli.output import Output
from cli.place import add_data_option, complain, layout_of
from local.pulling import PullStoppedError, Stopped

# Instructions, by the names Linux gives them, without which bfloat16 is emulated: a step then
# takes longer than in float32, which has twice the bytes.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CPUINFO = Path("/proc/cpuinfo")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`pull SPEC` and `list`."""
    parser = commands.add_parser("models", help="pull and list model versions")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pulling = actions.add_parser("pull", help="a known name, a directory, or hf:org/name[@rev]")
    add_data_option(pulling)
    pulling.add_argument("spec")
    pulling.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="to compute in; a part of the version (default: what this machine is faster in)",
    )
    pulling.set_defaults(run=run_pull)
    listing = actions.add_parser("list", help="versions in the store")
    add_data_option(listing)
    listing.set_defaults(run=run_list)


def run_pull(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Prints the version hash."""
    try:
        root = layout_of(arguments).models
        manifest = pull_with_progress(arguments.spec, root, Output(), dtype=arguments.dtype)
    except (ArtifactError, OSError) as error:
        complain(str(error))
        return 1
    print(f"{manifest.name} {manifest.version}")
    return 0


def run_list(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """One line for each version."""
    for manifest in ModelStore(layout_of(arguments).models).versions():
        size = sum(entry.bytes for entry in manifest.files) / 1024**2
        print(f"{manifest.name}  {manifest.version}  {manifest.format}  {size:.0f} MiB")
    return 0


def faster_dtype(cpuinfo: Path = _CPUINFO) -> ComputeDtype:
    """What this machine's processor computes in faster; float32 where it does not say."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words & _BFLOAT16_FLAGS else "float32"


def _never() -> bool:
    return False


def pull_with_progress(
    spec: str,
    root: Path,
    output: Output,
    *,
    dtype: ComputeDtype | None = None,
    stopped: Stopped = _never,
) -> Manifest:
    """Pull, unless the store has it, with a bar; for `dtype`, or for what suits this machine.

    Raises ArtifactError, and PullStoppedError soon after `stopped` says so.
    """
    puller = threading.get_ident()
    with output.progress() as bar:
        task = bar.add_task("model", total=None)

        def report(progress: Progress) -> None:
            # Raised in another thread of the pull it would be lost there.
            if stopped() and threading.get_ident() == puller:
                raise PullStoppedError(f"the pull of {spec} was stopped")
            bar.update(
                task,
                description=progress.stage,
                completed=progress.bytes_done,
                total=progress.bytes_total,
            )

        return pull(spec, ModelStore(root), report, compute_dtype=dtype or faster_dtype())
