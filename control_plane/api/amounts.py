"""Amounts in admin calls: whole numbers that every JSON reader holds exactly."""

from typing import Annotated

import msgspec

AMOUNT_MAX = 2**53 - 1

Amount = Annotated[int, msgspec.Meta(ge=0, le=AMOUNT_MAX)]
PositiveAmount = Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MAX)]
SignedAmount = Annotated[int, msgspec.Meta(ge=-AMOUNT_MAX, le=AMOUNT_MAX)]
