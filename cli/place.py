"""Which stack a command speaks to: the data directory, and what its supervisor says."""

import argparse
import sys
from pathlib import Path

from local.layout import Layout
from local.state import StackState, read_state

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = ROOT / ".local"


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """`--data DIR`, the same on every command."""
    parser.add_argument(
        "--data",
        type=lambda text: Path(text).resolve(),
        default=DEFAULT_DATA,
        metavar="DIR",
        help="the stack's data directory (default: .local)",
    )


def layout_of(arguments: argparse.Namespace) -> Layout:
    """Of the chosen data directory."""
    return Layout(arguments.data)


def state_or_complain(layout: Layout) -> StackState | None:
    """The running stack's state; None after a sentence on standard error."""
    state = read_state(layout)
    if state is None:
        complain(f"no stack is running in {shown(layout.root)}; start one with `make up`")
    return state


def shown(path: Path) -> str:
    """Relative to the repository where it lies within."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def complain(sentence: str) -> None:
    """A line on standard error."""
    print(f"headworks: {sentence}", file=sys.stderr)
