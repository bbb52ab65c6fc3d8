"""What a matcher allows, as ids."""

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask


def allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    """The ids that may follow, an end included. Fails where the matcher cannot say."""
    mask = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher, mask)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids
