"""Whether a request that a browser signed for us was made by a page of ours.

A cookie travels with whatever page asks, so an unsafe request needs more: what the browser says
of the page (`Sec-Fetch-Site`, `Origin`), which no page can write itself, and a token that only
our pages can read.
"""

from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def origin_of(url: str) -> str:
    """`https://ops.example.com/x` -> `https://ops.example.com`."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def fault(*, origin: str | None, fetch_site: str | None, host: str, public_url: str) -> str | None:
    """Why it is not one of ours; None where it is, or where no browser says anything.

    `public_url` "" takes the host that was asked: whoever is in front keeps `Host` as it is.
    """
    if fetch_site is not None and fetch_site != "same-origin":
        return f"the browser says that this came from another page (Sec-Fetch-Site: {fetch_site})"
    if origin is None:
        return None
    ours = origin_of(public_url) if public_url else None
    if ours is None:
        is_ours = bool(host) and origin.lower().partition("://")[2] == host.lower()
    else:
        is_ours = origin.lower() == ours
    return None if is_ours else "the browser says that this came from a page of another origin"


def landing(wanted: str, *, default: str) -> str:
    """Where to go after signing in: a path of ours, never another site.

    >>> [landing(path, default="/") for path in ("/console?x=1", "//evil.example", "https://e")]
    ['/console?x=1', '/', '/']
    """
    if not wanted.startswith("/") or wanted.startswith("//") or "\\" in wanted:
        return default
    return wanted if wanted.isprintable() and wanted.isascii() else default


def is_private(url: str) -> bool:
    """Whether nobody on the way can read or change what goes there: TLS, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
