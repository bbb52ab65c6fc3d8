"""What `up` shows: each process's lines behind its name, and a progress bar beside them."""

import sys

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

NAME_WIDTH = 13
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_black")


class Output:
    """One console, so that lines and the bar do not write over each other."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._colours: dict[str, str] = {}

    def line(self, process: str, text: str) -> None:
        """One line of a process's log."""
        colour = self._colours.setdefault(process, COLOURS[len(self._colours) % len(COLOURS)])
        self._console.print(f"[{colour}]{process:>{NAME_WIDTH}}[/] │ {escape(text)}")

    def progress(self) -> Progress:
        """A bar for bytes."""
        return Progress(
            TextColumn("{task.description:>13}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
        )
