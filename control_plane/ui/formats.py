"""Numbers as people read them. Pure; all are filters of the templates."""

from datetime import UTC, datetime
from decimal import Decimal

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
SECOND_MS = 1_000
TENTHS_MS = 10  # below, a tenth is worth reading; likewise below this share
TENTHS_SHARE = 0.1
SHORT_CHARS, SHORTENED_CHARS = 14, 10
NOTHING = "—"
_UNITS = ((10**12, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k"))


def count(value: float | None) -> str:
    """With three digits and a unit.

    >>> [count(n) for n in (None, 0, 999, 0.25, 1_234, 56_789, 999_999, 12_345_678)]
    ['—', '0', '999', '0.25', '1.23k', '56.8k', '1000k', '12.3M']
    """
    if value is None:
        return NOTHING
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)}{unit}"
    return f"{value:.0f}" if value == int(value) else _three_digits(value)


def rate(per_s: float) -> str:
    """By the second, or by the minute where less than one comes in a second.

    >>> [rate(n) for n in (0, 0.0265, 12.3)]
    ['0/s', '1.59/min', '12.3/s']
    """
    if 0 < per_s < 1:
        return f"{count(per_s * MINUTE_S)}/min"
    return f"{count(per_s)}/s"


def milliseconds(value: float | None) -> str:
    """A latency, to what can be told apart.

    >>> [milliseconds(n) for n in (None, 0.42, 12.3, 950.0, 1_500, 90_000)]
    ['—', '0.4 ms', '12 ms', '950 ms', '1.50 s', '90.0 s']
    """
    if value is None:
        return NOTHING
    if value < TENTHS_MS:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < SECOND_MS else f"{_three_digits(value / SECOND_MS)} s"


def _three_digits(value: float) -> str:
    """Without an exponent, whatever it is."""
    whole = len(str(abs(int(value))))
    return f"{value:.{max(0, 3 - whole)}f}"


def share(value: float | None) -> str:
    """Of one, in percent.

    >>> [share(n) for n in (None, 0, 0.005, 0.5, 1)]
    ['—', '0 %', '0.5 %', '50 %', '100 %']
    """
    if value is None:
        return NOTHING
    return f"{100 * value:.{int(0 < value < TENTHS_SHARE)}f} %"


def money(micro: float | None) -> str:
    """Of the price list's currency, from micro-units.

    >>> [money(n) for n in (None, 0, 9, 12_346, 45_600, 12_345_678_900)]
    ['—', '0.00', '0.000009', '0.01235', '0.0456', '12,345.68']
    """
    if micro is None:
        return NOTHING
    value = Decimal(round(micro)) / 1_000_000
    if value == 0 or abs(value) >= 1:
        return f"{value:,.2f}"
    # What is less than one keeps four digits of its own, and never an exponent.
    return f"{value:.{min(6, 3 - value.adjusted())}f}".rstrip("0")


def duration(ms: float | None) -> str:
    """How long, in its two largest units.

    >>> [duration(n) for n in (None, 400, 65_000, 7_300_000, 200_000_000)]
    ['—', '0 s', '1 min 5 s', '2 h 1 min', '2 d 7 h']
    """
    if ms is None:
        return NOTHING
    seconds = int(ms // 1_000)
    if seconds < MINUTE_S:
        return f"{seconds} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S} min {seconds % MINUTE_S} s"
    if seconds < DAY_S:
        return f"{seconds // HOUR_S} h {seconds % HOUR_S // MINUTE_S} min"
    return f"{seconds // DAY_S} d {seconds % DAY_S // HOUR_S} h"


def moment(ms: float | str | None) -> str:
    """UTC, to the second; ISO text is shortened to that.

    >>> moment(1_772_323_200_000)
    '2026-03-01 00:00:00'
    """
    if ms is None:
        return NOTHING
    if isinstance(ms, str):
        return ms[:19].replace("T", " ")
    return f"{datetime.fromtimestamp(ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"


def short(identity: str | None) -> str:
    """A content hash or an id as one recognises it.

    >>> short("0123456789abcdef0123")
    '0123456789…'
    """
    if not identity:
        return NOTHING
    return identity if len(identity) <= SHORT_CHARS else f"{identity[:SHORTENED_CHARS]}…"


FILTERS = {
    "count": count,
    "milliseconds": milliseconds,
    "share": share,
    "money": money,
    "duration": duration,
    "moment": moment,
    "short": short,
}
