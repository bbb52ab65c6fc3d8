"""Requests under which replicas died, by fingerprint: one that was there twice is refused.

A life of a replica counts once for a fingerprint, however many equal requests it was serving.
One that has since been answered is no suspect any more. `store/lua` holds the same for all
gateways together (`record_death`, `absolve_death`, `list_deaths`).
"""

import msgspec


class DeathRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is taken for the cause, and for how long."""

    deaths: int = 2
    refuse_ms: int = 600_000  # from the last of them
    kept_max: int = 1_024


class Suspect(msgspec.Struct, kw_only=True):
    """`boots` are the lives that ended under it, at most `DeathRules.deaths`."""

    boots: list[str]
    until_ms: int


class Listed(msgspec.Struct, frozen=True):
    """A suspect, as gateways are told of it."""

    fingerprint: str
    deaths: int
    left_ms: int


class Deaths:
    """The suspects. Times are Unix milliseconds."""

    def __init__(self, rules: DeathRules) -> None:
        self._rules = rules
        self.suspects: dict[str, Suspect] = {}

    def record(self, fingerprint: str, boot_id: str, now_ms: int) -> int:
        """A life ended under it; returns how many have, as far as counted."""
        self._expire(now_ms)
        suspect = self.suspects.get(fingerprint)
        if suspect is None:
            if len(self.suspects) >= self._rules.kept_max:
                del self.suspects[min(self.suspects, key=self._order)]
            suspect = self.suspects[fingerprint] = Suspect(boots=[], until_ms=0)
        if boot_id not in suspect.boots:
            suspect.boots = [*suspect.boots, boot_id][-self._rules.deaths :]
            suspect.until_ms = max(suspect.until_ms, now_ms + self._rules.refuse_ms)
        return len(suspect.boots)

    def absolve(self, fingerprint: str) -> None:
        """It has been answered; nothing for one that is refused by now."""
        suspect = self.suspects.get(fingerprint)
        if suspect is not None and len(suspect.boots) < self._rules.deaths:
            del self.suspects[fingerprint]

    def forget(self, fingerprint: str) -> None:
        """Whatever it was."""
        self.suspects.pop(fingerprint, None)

    def listed(self, now_ms: int) -> tuple[Listed, ...]:
        """All of them, the first to be forgotten first."""
        self._expire(now_ms)
        return tuple(
            Listed(name, len(suspect.boots), suspect.until_ms - now_ms)
            for name in sorted(self.suspects, key=self._order)
            for suspect in (self.suspects[name],)
        )

    def _order(self, fingerprint: str) -> tuple[int, str]:
        return self.suspects[fingerprint].until_ms, fingerprint

    def _expire(self, now_ms: int) -> None:
        for name in [n for n, s in self.suspects.items() if s.until_ms <= now_ms]:
            del self.suspects[name]
