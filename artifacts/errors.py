"""What can go wrong between a model's source and its use; each message is for an operator.

ArtifactError
├── UnknownModelError    no such name, directory or repository
├── UnsupportedError     found, but not a model this system can serve
├── SourceAwayError      the source cannot be reached, or answered with an error
├── CorruptError         bytes differ from what they should be; names the file
├── DiskFullError        not enough room; says how much is needed
└── BusyError            another pull of the same thing held the lock for too long
"""


class ArtifactError(Exception):
    """Base of all refusals of this package."""


class UnknownModelError(ArtifactError):
    """Nothing is known under this name."""


class UnsupportedError(ArtifactError):
    """The files are there, but not of a kind that can be served."""


class SourceAwayError(ArtifactError):
    """The source cannot be reached."""


class CorruptError(ArtifactError):
    """A file's bytes are not those that were recorded or announced."""


class DiskFullError(ArtifactError):
    """The disk has too little room."""


class BusyError(ArtifactError):
    """Waited for another process's pull, in vain."""
