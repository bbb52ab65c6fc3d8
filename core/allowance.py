"""What one place says of limits: a tier, a tenant or a key, for all models or for one.

Every number may be left unsaid, and is then whatever the next place says; 0 is unlimited.
What binds a request in the end is put together in `core.scopes`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec

from core.tickets import Limits

SAID_MAX = 2**53 - 1  # what every JSON reader holds exactly

Subject = Literal["tier", "tier_key", "tenant", "key"]
Said = Annotated[int, msgspec.Meta(ge=0, le=SAID_MAX)] | None
# What becomes of an answer that may not be, or cannot be paid, as long as it was asked for.
OutputPolicy = Literal["clamp", "refuse"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of each request alone; 0 is none."""

    prompt_tokens_max: int = 0
    output_tokens_max: int = 0
    deadline_ms_max: int = 0


class Allowance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates that refill, a number of requests at once, and bounds of each request."""

    requests_per_min: Said = None
    input_tokens_per_min: Said = None
    output_tokens_per_min: Said = None
    concurrency: Said = None
    prompt_tokens_max: Said = None
    output_tokens_max: Said = None
    deadline_ms_max: Said = None

    def over(self, other: "Allowance") -> "Allowance":
        """What is said here, and for the rest what is said there."""
        if self == NOTHING_SAID:
            return other
        said = ((name, getattr(self, name)) for name in FIELDS)
        return msgspec.structs.replace(
            other, **{n: value for n, value in said if value is not None}
        )

    @property
    def limits(self) -> Limits:
        """The rates and the concurrency, where nothing more is said."""
        return Limits(
            requests_per_min=self.requests_per_min or 0,
            input_tokens_per_min=self.input_tokens_per_min or 0,
            output_tokens_per_min=self.output_tokens_per_min or 0,
            concurrency=self.concurrency or 0,
        )

    @property
    def bounds(self) -> Bounds:
        """The bounds of each request, where nothing more is said."""
        return Bounds(
            prompt_tokens_max=self.prompt_tokens_max or 0,
            output_tokens_max=self.output_tokens_max or 0,
            deadline_ms_max=self.deadline_ms_max or 0,
        )


FIELDS = Allowance.__struct_fields__
NOTHING_SAID = Allowance()
UNLIMITED = Limits()
UNBOUNDED = Bounds()


class SaidRow(msgspec.Struct, frozen=True, kw_only=True):
    """One place's word as it is kept. `model` "" is for all models together."""

    subject: Subject
    model: str
    allowance: Allowance


def said_by(rows: Iterable[SaidRow], subject: Subject) -> dict[str, Allowance]:
    """What this subject says, by model; "" is for all of them together."""
    return {row.model: row.allowance for row in rows if row.subject == subject}


def layered(
    first: Mapping[str, Allowance], second: Mapping[str, Allowance]
) -> dict[str, Allowance]:
    """Each model's word of both, the first's before the second's; "" is always among them."""
    names = sorted({"", *first, *second})
    return {
        name: first.get(name, NOTHING_SAID).over(second.get(name, NOTHING_SAID)) for name in names
    }
