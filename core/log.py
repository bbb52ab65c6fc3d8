"""Log lines: one JSON object each on standard error, with the process's name.

Callers pass facts in `extra={"facts": {...}}`. Prompts, answers and key texts are never logged.
"""

import json
import logging
from typing import Literal

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class JSONFormatter(logging.Formatter):
    """`{"at": …, "level": …, "process": …, "logger": …, "message": …, <facts>}`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, object] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(process: str, level: Level = "INFO") -> None:
    """Send every logger's lines to standard error. Called once, in `__main__`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # httpx tells every request at INFO: a fifth of the token path's processor time.
    logging.getLogger("httpx").setLevel(logging.WARNING)
