"""What steps cost, learned from those that were made, and how much prefill decodes can bear.

A step of some decodes takes so long; each token of prefill beside them adds so much. From both
follows how many may be added before the decodes' next tokens come too late:

    ├──── decodes alone ────┤▒▒ prefill ▒▒┤      the limit is `itl_target_ms`, or without one
    0                                   limit    `itl_stretch` times the decodes alone

Pure: time comes in as numbers. Invariant: some prefill is always allowed, so that it ends, and
is measured again when it has become cheaper.
"""

from typing import Final

from worker.swap import Leaving, swap_is_cheaper

# How far one measurement moves an estimate. A token's cost that rises is believed at once, since
# decodes pay for each error, and one that falls by and by.
_RISE: Final = 0.5
_FALL: Final = 0.125
_DRIFT: Final = 0.25
# Prefill tokens that any step takes beside decodes, however slow they are.
PREFILL_LEAST: Final = 8


class Pace:
    """Estimates of one engine. Until the first measurement nothing is limited."""

    def __init__(
        self, *, target_ms: float, stretch: float, token_ms: float, copy_block_ms: float
    ) -> None:
        self.token_ms = token_ms  # of prefill, beside others; a guess until it is measured
        self.copy_block_ms = copy_block_ms  # device to host or back; likewise
        self._target_ms = target_ms
        self._stretch = stretch
        self._token_measured = False
        self._copy_measured = False
        self._decode_ms: dict[int, float] = {}  # by the rows' magnitude, a power of two

    def observed(
        self, step_ms: float, *, decode_rows: int, prefill_tokens: int, moved_blocks: int = 0
    ) -> None:
        """One step was made of this, and took so long."""
        size = decode_rows.bit_length()
        if decode_rows and prefill_tokens and not moved_blocks and size not in self._decode_ms:
            # An engine that starts under load may not make a step of decodes alone for long.
            rest_ms = step_ms - prefill_tokens * self.token_ms
            self._decode_ms[size] = max(rest_ms, step_ms / 2)
            return
        # Prefill by itself reads the weights once too, as one decode does.
        alone_ms = self.decode_ms(max(1, decode_rows))
        if moved_blocks:
            expected_ms = alone_ms + prefill_tokens * self.token_ms
            more_ms = max(0.0, step_ms - expected_ms) / moved_blocks
            known = self.copy_block_ms if self._copy_measured else more_ms
            self.copy_block_ms = known + (more_ms - known) * _DRIFT
            self._copy_measured = True
        elif prefill_tokens:
            more_ms = max(0.0, step_ms - alone_ms) / prefill_tokens
            known = self.token_ms if self._token_measured else more_ms
            self.token_ms = known + (more_ms - known) * (_RISE if more_ms > known else _FALL)
            self._token_measured = True
        elif decode_rows:
            known = self._decode_ms.get(size, step_ms)
            self._decode_ms[size] = known + (step_ms - known) * _DRIFT

    def decode_ms(self, rows: int) -> float:
        """How long a step of so many decodes takes, by the nearest measured number of rows."""
        if not (rows and self._decode_ms):
            return 0.0
        size = rows.bit_length()
        return self._decode_ms[min(self._decode_ms, key=lambda known: (abs(known - size), known))]

    def prefill_tokens(self, decode_rows: int, most: int, wanting: int = 1) -> int:
        """How many tokens of prefill, at most `most`, a step may take beside so many decodes.

        `wanting` sequences have a prefill to do. Where they are more than the decodes, a stretch
        is so many times longer: a few do not hold up many, as when an engine has just started.
        """
        limited = self._target_ms or self._stretch
        if not (decode_rows and self._token_measured and limited):
            return most
        decode_ms = self.decode_ms(decode_rows)
        room_ms = (self._stretch - 1) * decode_ms * max(1.0, wanting / decode_rows)
        if self._target_ms:
            room_ms = self._target_ms - decode_ms
        affordable = int(room_ms / self.token_ms) if self.token_ms else most
        return min(most, max(PREFILL_LEAST, affordable))

    def swap_is_cheaper(self, leaving: Leaving) -> bool:
        """Than computing again what leaves, by what moves and tokens take here."""
        return swap_is_cheaper(leaving, copy_block_ms=self.copy_block_ms, token_ms=self.token_ms)
