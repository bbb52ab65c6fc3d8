"""`check`: the audit of the live system, for an operator in doubt and the end of a test."""

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from control_plane.audit import audit
from control_plane.findings import Report
from control_plane.services import Services


@get("/check")
async def check(
    services: NamedDependency[Services],
    *,
    quiescent: FromQuery[bool] = False,
) -> Report:
    """Always 200: what is off, and what could not be asked, is in the report.

    `quiescent=true` also demands that nothing is in flight.
    """
    return await audit(services, quiescent=quiescent)
