"""Rollouts under a virtual clock: the real machine, synthetic sides, and how it did.

    sides    what a side's requests are like, drawn as counts
    trial    one rollout from its first look to its end
    figures  many seeds of a scenario: false alarms, time to detect, bad requests served

`python -m simulator.rollouts` prints the table of docs/rollouts.md.
"""
