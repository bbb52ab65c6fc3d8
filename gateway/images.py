"""Pictures that a caller puts among its text: read from any dialect, and never looked at here.

    data    base64, as the caller wrote it, of one of four types
    url     https alone; whoever answers fetches it, this gateway never does

An image has its place in the text of its turn, whose pieces are joined by line ends as ever. It
is in no log: its `repr` says what it is and not what it shows.
"""

import binascii
import string
from collections.abc import Iterable, Iterator
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from core.errors import Code, RefusedError, refuse
from gateway.fields import bad

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
URL_CHARS_MAX = 8_192

Detail = Literal["auto", "low", "high", "original"]
DETAILS: tuple[Detail, ...] = get_args(Detail)

_ALIASES = {"image/jpg": "image/jpeg"}  # as some clients write it
_HEAD_CHARS = 16  # of base64, which are the first twelve bytes
_SCHEME, _BASE64 = "data:", ";base64"
_BASE64_CHARS = (string.ascii_letters + string.digits + "+/").encode()


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is how many characters of its turn's text come before it; `param` is what names it."""

    at: int = 0
    media_type: str = ""  # of the data
    data: str = ""  # or
    url: str = ""
    detail: Detail = "auto"
    param: str = ""

    def __repr__(self) -> str:
        """What it is: it may end up in a log."""
        return f"Image({self.media_type}, {self.bytes} bytes)" if self.data else "Image(url)"

    @property
    def bytes(self) -> int:
        """Of the picture; 0 where it is elsewhere."""
        return len(self.data) // 4 * 3 - self.data.count("=", -2)

    @property
    def address(self) -> str:
        """Where it is to be had: its own address, or all of it as a data URL."""
        return self.url or f"{_SCHEME}{self.media_type}{_BASE64},{self.data}"


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request."""

    bytes_max: int  # of each
    count_max: int


class Written:
    """Text and images in the order in which they are written."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.images: list[Image] = []
        self.chars = 0

    @property
    def text(self) -> str:
        """Pieces are separate: glued together, words of two would become one."""
        return "\n".join(self.texts)

    def add(self, piece: "str | Image") -> None:
        """The next of either."""
        if isinstance(piece, Image):
            self.images.append(msgspec.structs.replace(piece, at=self.chars))
        else:
            self.chars += len(piece) + bool(self.texts)
            self.texts.append(piece)


def written(pieces: Iterable[str | Image]) -> Written:
    """All of them."""
    made = Written()
    for piece in pieces:
        made.add(piece)
    return made


def pieces(text: str, images: Iterable[Image]) -> Iterator[str | Image]:
    """The way back: neither an empty text nor the line ends that joined them."""
    start = 0
    for image in images:
        before = text[start : image.at].removeprefix("\n" if start else "")
        if before:
            yield before
        yield image
        start = image.at
    rest = text[start:].removeprefix("\n" if start else "")
    if rest:
        yield rest


def image_at(path: str, url: str, detail: Detail, param: str) -> Image:
    """From an https or a data URL, which `path` is the field of. Raises RefusedError."""
    if url[: len(_SCHEME)].lower() == _SCHEME:
        head, _, data = url[len(_SCHEME) :].partition(",")
        kind, base64, more = head.lower().partition(_BASE64)
        if not base64 or more:
            raise bad(path, "a data URL must be 'data:image/…;base64,…'")
        return image_of(path, path, kind, data, detail=detail, param=param)
    return Image(url=_checked_url(path, url), detail=detail, param=param)


def image_of(
    kind_path: str, path: str, media_type: str, data: str, *, detail: Detail = "auto", param: str
) -> Image:
    """From base64, which `path` is the field of. Raises RefusedError."""
    kind = _ALIASES.get(media_type, media_type)
    if kind not in MEDIA_TYPES:
        raise bad(kind_path, f"must be of a type among {', '.join(MEDIA_TYPES)}")
    if len(data) % 4:
        raise bad(path, "is not base64: its length is no multiple of 4")
    if not is_base64(data):  # all of it is looked at: what is none is nobody's image
        raise bad(path, "is not base64")
    if not _is_of(kind, binascii.a2b_base64(data[:_HEAD_CHARS])):
        raise bad(path, f"is no {kind}")
    return Image(media_type=kind, data=data, detail=detail, param=param)


def is_base64(data: str) -> bool:
    """Whether it can be decoded: told at a fifth of what decoding takes, for others wait."""
    raw = data.encode(errors="replace")
    padding = raw.translate(None, _BASE64_CHARS)
    return len(raw) % 4 == 0 and padding in (b"", b"=", b"==") and raw.endswith(padding)


def check_images(images: Iterable[Image], limits: ImageLimits) -> None:
    """Raises RefusedError for too many, or one too large."""
    for number, image in enumerate(images, 1):
        if number > limits.count_max:
            raise bad(image.param, f"a request has at most {limits.count_max} images")
        if image.bytes > limits.bytes_max:
            problem = f"an image has at most {limits.bytes_max} bytes, got {image.bytes}"
            raise bad(image.param, problem)


def takes_none(model: str, param: str) -> RefusedError:
    """This model reads text alone."""
    message = f"{param}: the model '{model}' takes no images"
    return refuse(Code.UNSUPPORTED, message, param=param)


def _is_of(kind: str, head: bytes) -> bool:
    """Whether the data is what it says: one provider may look, and the next may not."""
    match kind:
        case "image/jpeg":
            return head.startswith(b"\xff\xd8\xff")
        case "image/png":
            return head.startswith(b"\x89PNG\r\n\x1a\n")
        case "image/gif":
            return head.startswith((b"GIF87a", b"GIF89a"))
        case _:
            return head.startswith(b"RIFF") and head[8:12] == b"WEBP"


def _checked_url(path: str, url: str) -> str:
    if len(url) > URL_CHARS_MAX:
        raise bad(path, f"must be at most {URL_CHARS_MAX} characters")
    try:
        parts = urlsplit(url)
        is_good = parts.scheme == "https" and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_good = False
    if not is_good or not url.isascii() or not url.isprintable() or " " in url:
        raise bad(path, "must be an https URL without credentials, or a data URL")
    return url
