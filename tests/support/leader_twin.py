"""The lease as a value: what `store.leader` must answer, by a clock that a test moves."""

import msgspec


class LeaseTwin(msgspec.Struct, kw_only=True):
    """The row of one role. Times are of the server."""

    now_ms: int = 0
    holder: str = ""
    epoch: int = 0
    until_ms: int = 0
    held_by: set[str] = msgspec.field(default_factory=set)  # transactions under way, by holder

    def leads(self, holder: str, epoch: int) -> bool:
        return (self.holder, self.epoch) == (holder, epoch) and self.now_ms < self.until_ms

    def take(self, holder: str, lease_ms: int) -> int | None:
        """The new epoch, None while somebody leads or a leader's transaction is under way."""
        if self.now_ms < self.until_ms or self.held_by:
            return None
        self.holder, self.epoch = holder, self.epoch + 1
        self.until_ms = self.now_ms + lease_ms
        return self.epoch

    def renew(self, holder: str, epoch: int, lease_ms: int) -> bool:
        if not self.leads(holder, epoch):
            return False
        self.until_ms = self.now_ms + lease_ms
        return True

    def release(self, holder: str, epoch: int) -> None:
        if self.leads(holder, epoch):
            self.until_ms = self.now_ms
