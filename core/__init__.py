"""What every process must agree on.

Admission rule: a thing may enter only if two processes disagreeing on it would be a bug.
Nothing here does I/O, reads a clock or rolls dice: time comes in as `now_ms`.
"""
