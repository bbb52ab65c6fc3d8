"""Reading a request body field by field, with a refusal that names the field.

Not a schema library: both dialects need `null` read as absent, parameters that are accepted
only at their neutral value, and errors in their own words. Every field taken is removed, so
whatever is left at the end is unknown. Anything wrong raises RefusedError; nothing else does.
"""

from collections.abc import Iterator

import msgspec

from core.errors import Code, RefusedError, refuse

MODEL_CHARS_MAX = 256
SHORT_TEXT_CHARS_MAX = 512  # names of users, conversations and the like
STOP_CHARS_MAX = 256
MESSAGES_MAX = 10_000
PARTS_MAX = 1_000  # of one message
INTEGER_MAX = 2**31 - 1
COUNT_MAX = 2**53 - 1  # what every JSON reader holds exactly
SHOWN_CHARS_MAX = 64  # of the caller's own words in a refusal
# Of one body: `[],[],…` takes twenty times its size once decoded. A comma in a text counts
# as well, but costs the prompt about a token: no model takes a text that comes near this.
VALUES_MAX = 2_000_000
TIMEOUT_S_MAX = 1_000_000  # what we allow is far less, and holds

_KINDS: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}

_decoder = msgspec.json.Decoder()


class Fields:
    """One JSON object. `index` is how the dialect writes an array index: `[{}]` or `.{}`."""

    def __init__(self, value: object, path: str, *, index: str) -> None:
        if type(value) is not dict:
            raise wrong_kind(path, "an object", value)
        self._left: dict[str, object] = value
        self._path = path
        self._index = index

    def at(self, name: str) -> str:
        """The full path of a field, as refusals name it."""
        return f"{self._path}.{name}" if self._path else name

    def says_nothing(self, name: str, accepted: tuple[object, ...]) -> bool:
        """Whether the field is absent, null or one of `accepted`; if so, it is taken."""
        value = self._left.get(name)
        silent = value is None or any(_same(value, each) for each in accepted)
        if silent:
            self._left.pop(name, None)
        return silent

    def take(self, name: str) -> object:
        """Any value; None for null and for a field that is not there."""
        return self._left.pop(name, None)

    def peek(self, name: str) -> object:
        """As `take`, but it stays to be taken."""
        return self._left.get(name)

    def text(self, name: str, *, chars_max: int | None = None) -> str | None:
        """A string, at most `chars_max` long."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not str:
            raise wrong_kind(self.at(name), "a string", value)
        if chars_max is not None and len(value) > chars_max:
            raise bad(self.at(name), f"must be at most {chars_max} characters")
        return value

    def required_text(self, name: str, *, chars_max: int | None = None) -> str:
        """A string of at least one character."""
        value = self.text(name, chars_max=chars_max)
        if value is None:
            raise missing(self.at(name))
        if not value:
            raise bad(self.at(name), "must not be empty")
        return value

    def integer(self, name: str, low: int, high: int = INTEGER_MAX) -> int | None:
        """An integer from `low` to `high`; 1.0 is not one."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int:
            raise wrong_kind(self.at(name), "an integer", value)
        if not low <= value <= high:
            raise bad(self.at(name), f"must be from {low} to {high}, got {_shown(str(value))}")
        return value

    def count(self, name: str) -> int | None:
        """How many of something there were."""
        return self.integer(name, 0, COUNT_MAX)

    def required_count(self, name: str) -> int:
        """As `count`, and it must be told."""
        value = self.count(name)
        if value is None:
            raise missing(self.at(name))
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int and type(value) is not float:
            raise wrong_kind(self.at(name), "a number", value)
        if not low <= value <= high:
            raise bad(self.at(name), f"must be from {low:g} to {high:g}, got {_shown(str(value))}")
        return float(value)

    def boolean(self, name: str) -> bool | None:
        """`true` or `false`."""
        value = self.take(name)
        if value is not None and type(value) is not bool:
            raise wrong_kind(self.at(name), "a boolean", value)
        return value

    def choice(self, name: str, *values: str) -> str | None:
        """One of `values`."""
        value = self.text(name)
        if value is not None and value not in values:
            listed = ", ".join(f"'{each}'" for each in values)
            raise bad(self.at(name), f"must be one of {listed}, got '{_shown(value)}'")
        return value

    def nested(self, name: str) -> "Fields | None":
        """A nested object."""
        value = self.take(name)
        return None if value is None else Fields(value, self.at(name), index=self._index)

    def objects(self, name: str, *, count_max: int) -> Iterator["Fields"]:
        """The objects of a required array that is not empty."""
        value = self.take(name)
        if value is None:
            raise missing(self.at(name))
        yield from self._each_object(name, value, count_max)

    def _each_object(self, name: str, value: object, count_max: int) -> Iterator["Fields"]:
        for path, item in self._each(name, value, count_max):
            yield Fields(item, path, index=self._index)

    def _each(self, name: str, value: object, count_max: int) -> Iterator[tuple[str, object]]:
        if type(value) is not list:
            raise wrong_kind(self.at(name), "an array", value)
        if not value:
            raise bad(self.at(name), "must not be empty")
        if len(value) > count_max:
            raise bad(self.at(name), f"must have at most {count_max} items, got {len(value)}")
        for i, item in enumerate(value):
            yield self.at(name) + self._index.format(i), item

    def strings(self, name: str, *, count_max: int, chars_max: int) -> tuple[str, ...]:
        """An array of strings that are not empty; an empty or absent array is ()."""
        value = self.take(name)
        if value is None or value == []:
            return ()
        return tuple(
            _string(path, item, chars_max) for path, item in self._each(name, value, count_max)
        )

    def string_or_strings(self, name: str, *, count_max: int, chars_max: int) -> tuple[str, ...]:
        """As `strings`, where one string may stand for an array of one."""
        if type(self._left.get(name)) is str:
            return (_string(self.at(name), self.take(name), chars_max),)
        return self.strings(name, count_max=count_max, chars_max=chars_max)

    def text_or_objects(self, name: str, *, count_max: int) -> "str | Iterator[Fields]":
        """A required string, or the objects of an array that is not empty."""
        value = self.take(name)
        if value is None:
            raise missing(self.at(name))
        if type(value) is str:
            return value
        if type(value) is not list:
            raise wrong_kind(self.at(name), "a string or an array", value)
        return self._each_object(name, value, count_max)

    def neutral(self, name: str, accepted: tuple[object, ...] = ()) -> None:
        """Refuse a parameter we do not support, unless its value changes nothing."""
        if not self.says_nothing(name, accepted):
            raise unsupported(self.at(name), accepted)

    def first_left(self) -> str | None:
        """A field that nobody took, if there is one; shortened."""
        return next((_shown(name) for name in self._left), None)


def read_timeout(fields: Fields) -> float | None:
    """`timeout`, in seconds: how long the caller waits for all of its answer."""
    seconds = fields.number("timeout", 0, TIMEOUT_S_MAX)
    if seconds == 0:
        raise bad(fields.at("timeout"), "must be above 0")
    return seconds


def read_object(body: bytes, *, index: str) -> Fields:
    """The body as one JSON object in UTF-8."""
    if len(body) > VALUES_MAX and sum(map(body.count, (b",", b"[", b"{"))) > VALUES_MAX:
        raise refuse(Code.TOO_LARGE, f"The request body has over {VALUES_MAX} values")
    try:
        value = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refuse(Code.BAD_REQUEST, f"The request body is not valid JSON: {error}") from error
    if type(value) is not dict:
        raise refuse(
            Code.BAD_REQUEST, f"The request body must be a JSON object, got {_kind(value)}"
        )
    return Fields(value, "", index=index)


def bad(path: str, problem: str) -> RefusedError:
    """The field's value cannot be used."""
    return refuse(Code.BAD_REQUEST, f"{path}: {problem}", param=path)


def missing(path: str) -> RefusedError:
    """A required field is absent or null."""
    return bad(path, "is required")


def wrong_kind(path: str, expected: str, value: object) -> RefusedError:
    """The field holds another JSON type."""
    return bad(path, f"must be {expected}, got {_kind(value)}")


def unsupported(path: str, accepted: tuple[object, ...] = ()) -> RefusedError:
    """We do not serve this parameter, or not this value of it."""
    instead = " or ".join(msgspec.json.encode(each).decode() for each in accepted)
    hint = f"; leave it out or send {instead}" if instead else ""
    return refuse(Code.UNSUPPORTED, f"{path}: not supported here{hint}", param=path)


def _string(path: str, value: object, chars_max: int) -> str:
    if type(value) is not str:
        raise wrong_kind(path, "a string", value)
    if not value:
        raise bad(path, "must not be empty")
    if len(value) > chars_max:
        raise bad(path, f"must be at most {chars_max} characters")
    return value


def _kind(value: object) -> str:
    return _KINDS[type(value)]


def _same(value: object, accepted: object) -> bool:
    # 0 and 0.0 are one JSON number, but False is not 0.
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
