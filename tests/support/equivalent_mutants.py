"""Mutants of the ledger's rules that behave as the original does, each with the reason.

By function, the line before, and the line after: mutmut's own numbers move with every change.
"""

from typing import TypeAlias

Change: TypeAlias = tuple[str, str, str]

EQUIVALENT: dict[Change, str] = {}
