"""What names may look like. They travel in URLs, Valkey keys and request ids.

A deployment and a region make a pool's name with `@` between them, and a model and a moment
a price's, so none of them holds one.
"""

from typing import Annotated

import msgspec

END = r"$(?!\n)"  # of the text: `$` alone is also found before a last newline

DeploymentName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*" + END, max_length=63)
]
RegionName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]*" + END, max_length=32)]
ModelName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*" + END, max_length=128)
]
TenantName = Annotated[
    str,
    msgspec.Meta(pattern=r"^[^\s\x00-\x1f](?:[^\x00-\x1f]*[^\s\x00-\x1f])?" + END, max_length=100),
]
KeyName = Annotated[
    str,
    msgspec.Meta(pattern=r"^[^\s\x00-\x1f](?:[^\x00-\x1f]*[^\s\x00-\x1f])?" + END, max_length=100),
]
BookName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*" + END, max_length=64)]
TierName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*" + END, max_length=32)]
