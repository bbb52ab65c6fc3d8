"""`python -m benchmarks.gateway_bare`: the gateway without governance, for contrast alone.

Nothing is reserved, metered or settled; with nobody at its Valkey's address, limits and
placement are decided in the process. What is left is the relay itself.
"""

import sys
from collections.abc import Sequence

from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from gateway import gateway
from gateway.__main__ import main
from gateway.books import Books


class NoBooks(Books):
    """Agrees to everything and writes nothing."""

    async def reserve(self, asked: Reserve, *, hard_capped: bool) -> Reserved | LedgerRefused:  # noqa: ARG002 - it overrides, and every caller names the argument
        """All of it."""
        return Reserved(reserved_micro=asked.amount_micro)

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """All of it."""
        return Reserved(reserved_micro=more.total_micro)

    async def settle(self, word: Settle) -> None:
        """Nobody is told."""

    async def checkpoint(self, witnesses: Sequence[Witness]) -> None:
        """Nobody is told."""


if __name__ == "__main__":
    vars(gateway)["Books"] = NoBooks  # what the gateway would make
    sys.exit(main())
