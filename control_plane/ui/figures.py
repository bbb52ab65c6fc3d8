"""Numbers with their names, and lines over time: what pages are made of. Pure."""

import msgspec

from control_plane.ui import formats


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number with its name; `tone` is '' for one that needs nobody, else good, warn or bad."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over the same times. `said` is the chart as a sentence, for those who hear it."""

    title: str
    unit: str
    times_s: list[int]
    lines: dict[str, list[float | None]]
    said: str

    @property
    def json(self) -> str:
        """For the script that draws it."""
        return msgspec.json.encode(
            {"unit": self.unit, "times": self.times_s, "lines": self.lines}
        ).decode()


def chart(title: str, unit: str, times_s: list[int], lines: dict[str, list[float | None]]) -> Chart:
    """With a sentence on each line: where it is, and where it was at most."""
    told = []
    for name, values in lines.items():
        known = [value for value in values if value is not None]
        if known:
            told.append(
                f"{name} now {formats.count(known[-1])}, at most {formats.count(max(known))} {unit}"
            )
    said = f"{title}: {'; '.join(told) or 'nothing measured'}"
    return Chart(title=title, unit=unit, times_s=times_s, lines=lines, said=said)
