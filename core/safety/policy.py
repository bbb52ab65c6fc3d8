"""A safety policy as an operator writes it: rules, each a detector and what follows from a hit.

Nothing here searches a text; `core.safety.rulebook` makes of a policy what does, and refuses
one that could blow up. Unknown fields are refused.
"""

from typing import Annotated, Literal, get_args

import msgspec

RULES_MAX = 64
TERMS_MAX = 10_000  # of one rule
TERM_CHARS_MAX = 128
PATTERN_CHARS_MAX = 1_000
REPLACEMENT = "[removed]"
STRETCH_CHARS = 240  # that a classifier looks at together, counted from a text's beginning

Stage = Literal["input", "output"]
Action = Literal["log", "mask", "block", "end"]
OnFault = Literal["open", "closed"]
PIIKind = Literal["card", "iban", "email", "phone", "ssn", "ipv4", "ipv6", "api_key"]
PII_KINDS: tuple[PIIKind, ...] = get_args(PIIKind)

RuleName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$(?!\n)", max_length=64)]
# Safe wherever it is put: in prose, and inside a JSON string. Never empty: a hit is seen.
Replacement = Annotated[str, msgspec.Meta(pattern=r'^[^"\\\x00-\x1f]+$(?!\n)', max_length=64)]
Term = Annotated[str, msgspec.Meta(min_length=1, max_length=TERM_CHARS_MAX)]


class Terms(msgspec.Struct, frozen=True, kw_only=True, tag="terms", forbid_unknown_fields=True):
    """Words and phrases, whatever their case, accents or invisible characters.

    With `whole_word` no letter or digit may stand right before or after one.
    """

    terms: Annotated[tuple[Term, ...], msgspec.Meta(min_length=1, max_length=TERMS_MAX)]
    whole_word: bool = False


class Pattern(msgspec.Struct, frozen=True, kw_only=True, tag="pattern", forbid_unknown_fields=True):
    """A regular expression of `core.safety.syntax`: its matches have a greatest length."""

    pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=PATTERN_CHARS_MAX)]
    ignore_case: bool = False


class PII(msgspec.Struct, frozen=True, kw_only=True, tag="pii", forbid_unknown_fields=True):
    """Personal data by its shape and its check digits; see `core.safety.pii`."""

    kinds: Annotated[tuple[PIIKind, ...], msgspec.Meta(min_length=1)] = PII_KINDS


class Classifier(
    msgspec.Struct, frozen=True, kw_only=True, tag="classifier", forbid_unknown_fields=True
):
    """The bundled model's opinion of each stretch of text, a hit from `threshold` on."""

    model: Literal["prompt-injection"] = "prompt-injection"
    threshold: Annotated[float, msgspec.Meta(ge=0.5, le=0.999)] = 0.9


class Judge(msgspec.Struct, frozen=True, kw_only=True, tag="judge", forbid_unknown_fields=True):
    """A served model's opinion, asked as a request of the tenant's own, metered and billed.

    On output it is asked once at the end, or for every `every_chars` characters, which are
    held until it has answered.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    question: Annotated[str, msgspec.Meta(min_length=1, max_length=2_000)]
    timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=60_000)] = 5_000
    every_chars: Annotated[int, msgspec.Meta(ge=0, le=4_000)] = 0


Detector = Terms | Pattern | PII | Classifier | Judge


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`on_fault` is for a detector that could not do its work: let through, or refuse."""

    name: RuleName
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=2)]
    detector: Detector
    action: Action
    replacement: Replacement = REPLACEMENT
    on_fault: OnFault = "closed"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules in order; where two mask the same place, the first says by what."""

    rules: Annotated[tuple[Rule, ...], msgspec.Meta(min_length=1, max_length=RULES_MAX)]


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a policy, as it holds for one tenant.

    `policy` None cannot be read here: a newer release has written what we do not know.
    """

    name: str
    version: int
    policy: Policy | None
    keep_text: bool = False  # hits are recorded with their text
