"""Mutants of the rules that behave as the original does, each with the reason.

By function, the line before, and the line after: mutmut's own numbers move with every change.
"""

from typing import TypeAlias

Change: TypeAlias = tuple[str, str, str]

_GRANT_OF_LESS = "what frees room, or needs none, is granted whole by any limit"
_ADJUSTMENT = "return granted_micro(account_limits(account), amount, amount) if {} else amount"
_REPRICE = "return granted_micro(limits, delta, delta) if {} else delta"
_NOT_READ = "limits do not depend on what the request itself holds"

_COST = "self.token_ms = known + (more_ms - known) * (_RISE if more_ms {} known else _FALL)"

EQUIVALENT: dict[Change, str] = {
    (
        "top_up",
        "if more.total_micro <= held:",
        "if more.total_micro < held:",
    ): "a total that is held already asks for 0 more, which is granted and posts nothing",
    (
        "expire",
        "return self._close(row, cause, ended=changed, freeing=EntryKind.EXPIRE)",
        "return self._close(None, cause, ended=changed, freeing=EntryKind.EXPIRE)",
    ): "the row before is compared with only where nothing is freed",
    (
        "_adjustment",
        _ADJUSTMENT.format("amount > 0"),
        _ADJUSTMENT.format("(amount > 0) or True"),
    ): _GRANT_OF_LESS,
    (
        "_adjustment",
        _ADJUSTMENT.format("amount > 0"),
        _ADJUSTMENT.format("amount >= 0"),
    ): _GRANT_OF_LESS,
    (
        "_reprice",
        _REPRICE.format("delta > 0"),
        _REPRICE.format("(delta > 0) or True"),
    ): _GRANT_OF_LESS,
    (
        "_reprice",
        _REPRICE.format("delta > 0"),
        _REPRICE.format("delta >= 0"),
    ): _GRANT_OF_LESS,
    (
        "_allowed",
        "limits = self._limits(Row(asked=asked, day=self.today, reserved_micro=0))",
        "limits = self._limits(Row(asked=asked, day=self.today, reserved_micro=None))",
    ): _NOT_READ,
    (
        "_allowed",
        "limits = self._limits(Row(asked=asked, day=self.today, reserved_micro=0))",
        "limits = self._limits(Row(asked=asked, day=self.today, reserved_micro=1))",
    ): _NOT_READ,
    (
        "observed",
        _COST.format(">"),
        _COST.format(">="),
    ): "what is measured as it was known moves nothing by either weight",
    ("_list", "self._stamp += 1", "self._stamp += 2"): "stamps are only compared",
}
