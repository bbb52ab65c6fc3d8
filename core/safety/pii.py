r"""Personal data by its shape, and by its check digits where it has any.

Shapes are patterns of `core.safety.syntax` between neighbours that are neither letter nor
digit; a check sees a match's text and says whether it is one.
"""

import ipaddress
from typing import NamedTuple

from core.safety.folding import narrow
from core.safety.patterns import Check
from core.safety.policy import PIIKind
from core.safety.syntax import Node, Place, Sequence, parse

CARD_DIGITS = range(13, 20)
IBAN_CHARS = range(15, 35)
HEX_DIGITS_MIN = 3  # of an IPv6 address

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_SSN_AREA = r"(?:00[1-9]|0[1-9]\d|[1-57-8]\d\d|6[0-57-9]\d|66[0-57-9])"
_SSN_SERIAL = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)  # the sum of the digits of twice a digit
_HEX = r"[0-9a-fA-F]"


class Shape(NamedTuple):
    """Any of the patterns, between `before` and `after`."""

    patterns: tuple[str, ...]
    check: Check | None = None
    before: tuple[str, ...] = ("<w",)
    after: tuple[str, ...] = (">w",)

    def nodes(self) -> tuple[Node, ...]:
        """For the automaton."""
        before, after = (tuple(map(Place, place)) for place in (self.before, self.after))
        return tuple(Sequence((*before, parse(each), *after)) for each in self.patterns)


def luhn(text: str) -> bool:
    """ISO/IEC 7812-1, annex B: of 13 to 19 digits, and not all zeros."""
    digits = [ord(char) - 48 for char in _plain(text) if char.isdigit()]
    if len(digits) not in CARD_DIGITS or not any(digits):
        return False
    doubled = sum([_DOUBLED[digit] for digit in digits[-2::-2]])
    return (sum(digits[-1::-2]) + doubled) % 10 == 0


def iban(text: str) -> bool:
    """ISO 13616: the number read as one, letters as 10 to 35, is 1 modulo 97."""
    plain = "".join(char for char in _plain(text) if char.isalnum()).upper()
    if len(plain) not in IBAN_CHARS:
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def ipv6(text: str) -> bool:
    """An address that names something: `::` and the like are also punctuation."""
    plain = _plain(text)
    if sum(char in "0123456789abcdefABCDEF" for char in plain) < HEX_DIGITS_MIN:
        return plain == "::1"
    try:
        ipaddress.IPv6Address(plain)
    except ValueError:
        return False
    return True


def _plain(text: str) -> str:
    return text if text.isascii() else "".join(map(narrow, text))


# One kind may have several shapes, each with a check of its own.
SHAPES: dict[PIIKind, tuple[Shape, ...]] = {
    "card": (Shape((r"\d(?:[ -]?\d){12,18}",), luhn, ("<d",), (">d",)),),
    "iban": (Shape((r"[A-Za-z]{2}\d{2}(?: ?[A-Za-z0-9]){11,30}",), iban),),
    # RFC 5321, 4.5.3.1: at most 64 octets before the @; hosts shortened to what is in use.
    "email": (Shape((r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}@(?:[\w-]{1,63}\.){1,6}\w{2,24}",), after=()),),
    # E.164: at most 15 digits after the +; national numbers as North America writes them.
    "phone": (
        Shape((r"\+[1-9](?:[ .()-]{0,2}\d){6,14}",), before=(), after=(">d",)),
        Shape((r"(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}",), before=("<d",), after=(">d",)),
    ),
    # As the Social Security Administration issues them: no area 000, 666 or 9xx.
    "ssn": (
        Shape(
            (rf"{_SSN_AREA}[ -](?:0[1-9]|[1-9]\d)[ -]{_SSN_SERIAL}",),
        ),
    ),
    "ipv4": (Shape((_IPV4,)),),
    "ipv6": (
        Shape(
            (
                rf"(?:{_HEX}{{0,4}}:){{2,7}}(?:{_HEX}{{1,4}})?",
                rf"(?:{_HEX}{{0,4}}:){{2,6}}{_IPV4}",
            ),
            ipv6,
        ),
    ),
    "api_key": (
        Shape(
            (
                r"hw_[a-z2-7]{8}_[a-z2-7]{32}_[0-9a-f]{6}",  # ours: `core.tenancy`
                r"sk-(?:[A-Za-z0-9]{1,12}-){0,3}[A-Za-z0-9_-]{20,160}",  # OpenAI, Anthropic
                r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
                r"gh[pousr]_[A-Za-z0-9]{36,80}",  # GitHub
                r"github_pat_[A-Za-z0-9_]{22,100}",
                r"glpat-[A-Za-z0-9_-]{20,40}",  # GitLab
                r"AIza[A-Za-z0-9_-]{35}",  # Google
                r"xox[abeprs]-[A-Za-z0-9-]{10,120}",  # Slack
                r"hf_[A-Za-z0-9]{34,40}",  # Hugging Face
                r"eyJ[A-Za-z0-9_-]{10,300}\.eyJ[A-Za-z0-9_-]{10,400}\.[A-Za-z0-9_-]{20,120}",
                r"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----",
            ),
        ),
    ),
}
