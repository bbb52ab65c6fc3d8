"""Names of calls in answers: a function of the request, so that every telling has the same."""


def call_id(prefix: str, request_id: str, *, choice: int, call: int) -> str:
    """`req_x` -> `call_x_0_1`, the second call of the first choice.

    >>> call_id("toolu_", "req_local_12ab", choice=0, call=1)
    'toolu_local_12ab_0_1'
    """
    return f"{prefix}{request_id.removeprefix('req_')}_{choice}_{call}"
