"""Models from the Hugging Face hub, by huggingface_hub, which resumes by itself.

The revision is resolved to a commit first, so that all files are of one commit and the
manifest says which. Tokens, mirrors and offline mode are huggingface_hub's own settings.
"""

import contextlib
import fnmatch
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from artifacts.errors import SourceAwayError, UnknownModelError, UnsupportedError
from artifacts.files import require_room
from artifacts.layout import INDEX, OPTIONAL, REQUIRED
from artifacts.progress import Meter, Report
from artifacts.sources.base import Fetched

POLL_S = 0.5
PATTERNS = (*REQUIRED, *OPTIONAL, INDEX, "model*.safetensors")
_SPEC = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


class Snapshot(msgspec.Struct, frozen=True):
    """A commit and how many bytes of it are wanted."""

    commit: str
    bytes: int


class Hub(Protocol):
    """What is asked of the hub; both raise ArtifactError."""

    def resolve(self, repository: str, revision: str | None) -> Snapshot:
        """The commit that a revision (None: the default branch) means now."""

    def download(self, repository: str, commit: str, folder: Path) -> None:
        """Bring the wanted files into `folder`, going on from what is there."""


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at a revision."""

    repository: str
    revision: str | None
    hub: Hub
    sha256s: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repository.rpartition("/")[2].lower()

    @property
    def key(self) -> str:
        """By repository: its revisions share most files."""
        return "hub-" + self.repository.replace("/", "--")

    def fetch(self, workspace: Path, report: Report) -> Fetched:
        """Download, or go on with it."""
        snapshot = self.hub.resolve(self.repository, self.revision)
        folder = workspace / snapshot.commit
        folder.mkdir(exist_ok=True)
        require_room(workspace, max(0, snapshot.bytes - _size(folder)))
        meter = Meter(report, "download", snapshot.bytes)
        with _watched(lambda: meter.reach(min(_size(folder), snapshot.bytes))):
            self.hub.download(self.repository, snapshot.commit, folder)
        meter.reach(snapshot.bytes)
        source = f"hf:{self.repository}@{snapshot.commit}"
        return Fetched(path=folder, source=source, owned=True)


def parse_hub(spec: str, hub: Hub) -> HubSource:
    """Of `hf:owner/name[@revision]`. Raises UnknownModelError."""
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise UnknownModelError(f"{spec!r} is not of the form hf:owner/name or hf:owner/name@rev")
    return HubSource(repository=match["repository"], revision=match["revision"], hub=hub)


class HuggingFaceHub:
    """The real hub. `endpoint` None is huggingface_hub's own."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def resolve(self, repository: str, revision: str | None) -> Snapshot:
        """One request; no answer within huggingface_hub's time limits is SourceAwayError."""
        import huggingface_hub  # noqa: PLC0415 - half a second to import, needed only here

        with _hub_errors(repository, revision):
            api = huggingface_hub.HfApi(endpoint=self._endpoint)
            info = api.model_info(repository, revision=revision, files_metadata=True)
        wanted = [
            file
            for file in info.siblings or ()
            if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in PATTERNS)
        ]
        if not any(file.rfilename.endswith(".safetensors") for file in wanted):
            raise UnsupportedError(f"{repository} holds no safetensors weights")
        assert info.sha is not None, "the hub names the commit of every answer"
        return Snapshot(info.sha, sum(file.size or 0 for file in wanted))

    def download(self, repository: str, commit: str, folder: Path) -> None:
        """huggingface_hub keeps unfinished files beside the finished ones and goes on."""
        import huggingface_hub  # noqa: PLC0415 - as above
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - as above

        disable_progress_bars()  # ours tells the same
        with _hub_errors(repository, commit):
            huggingface_hub.snapshot_download(
                repository,
                revision=commit,
                local_dir=folder,
                allow_patterns=list(PATTERNS),
                endpoint=self._endpoint,
            )


@contextlib.contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    import httpx2  # noqa: PLC0415 - huggingface_hub's own HTTP client, whose errors it lets through
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    try:
        yield
    except errors.GatedRepoError as error:
        raise UnknownModelError(
            f"{repository} is gated: accept its terms and set a token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModelError(f"{repository} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModelError(f"the hub shows no repository {repository} to us") from error
    except _away(httpx2.HTTPError) as error:
        raise SourceAwayError(f"the Hugging Face hub cannot be reached: {error}") from error
    except errors.HFValidationError as error:
        raise UnknownModelError(str(error)) from error


def _away(http_error: type[Exception]) -> tuple[type[Exception], ...]:
    """All that means "not now", which is not all OSErrors: a full disk is ours to mend."""
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    return (
        http_error,
        ConnectionError,
        errors.LocalEntryNotFoundError,
        errors.FileMetadataError,
        errors.XetDownloadError,
    )


@contextlib.contextmanager
def _watched(look: Callable[[], None]) -> Iterator[None]:
    """Report growth from a thread: huggingface_hub's own bars are for terminals."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            look()

    thread = threading.Thread(target=watch, name="hub-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # files are renamed while we look
            sizes += path.stat().st_size if path.is_file() else 0
    return sizes
