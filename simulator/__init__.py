"""Drives the real decision modules under a virtual clock and a seed, faults included.

Real: the dispatcher's rules, the ledger's, the engine's scheduler, blocks and text, resuming.
Re-expressed in virtual time: the shells around them. Invariant: nothing here reads a clock,
rolls dice that the seed did not load, or does I/O, so that a seed replays exactly.
"""
