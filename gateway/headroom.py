"""Which of a tenant's buckets to tell of, where a dialect has one name for several."""

from core.tickets import Remaining


def tightest(*buckets: Remaining) -> Remaining:
    """The limited bucket with the smallest share left; an unlimited one if none is limited."""
    limited = [bucket for bucket in buckets if bucket.limit]
    return min(limited, key=lambda bucket: bucket.remaining / bucket.limit, default=Remaining())
