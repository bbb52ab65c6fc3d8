"""`headworks logs`: the end of one process's log, or of all, and what comes after."""

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cli.output import Output
from cli.place import add_data_option, complain, layout_of
from local.supervisor import last_lines

POLL_S = 0.3


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Which process, how much, and whether to stay."""
    parser = commands.add_parser("logs", help="what the processes say")
    add_data_option(parser)
    parser.add_argument("process", nargs="?", help="gateway, worker, control-plane, postgres, …")
    parser.add_argument("-n", "--lines", type=int, default=50, help="from each (default: 50)")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """1 when there is no such log."""
    found = sorted(layout_of(arguments).logs.glob("*.log"))
    wanted = [path for path in found if arguments.process in (None, path.stem)]
    if not wanted:
        complain(f"no such log; there are: {', '.join(path.stem for path in found) or 'none'}")
        return 1
    output = Output()
    ends = {path: path.stat().st_size for path in wanted}
    for path in wanted:
        for line in last_lines(path, arguments.lines):
            output.line(path.stem, line)
    while arguments.follow:
        for path, line in _new_lines(ends):
            output.line(path.stem, line)
        time.sleep(POLL_S)
    return 0


def _new_lines(ends: dict[Path, int]) -> Iterator[tuple[Path, str]]:
    """Whole lines written since the last call; `ends` moves on."""
    for path, end in ends.items():
        with path.open("rb") as file:
            file.seek(end)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        ends[path] = end + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            yield path, line
