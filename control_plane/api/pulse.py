"""The last minutes of the fleet, for people who watch: goodput, first tokens, queue, cost."""

from typing import Annotated, Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from control_plane.api.paging import Filter
from control_plane.pulse import PulseList
from control_plane.services import Services

Minutes = Annotated[Literal[15, 60, 360], QueryParameter()]


@get("/pulse")
async def read_pulse(
    services: NamedDependency[Services], minutes: Minutes = 15, model: Filter = ""
) -> PulseList:
    """Of everybody, or of one public name. At most two seconds old; 503 when it takes too long."""
    return await services.pulse.read(minutes, model)
