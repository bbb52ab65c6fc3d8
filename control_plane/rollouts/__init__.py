"""Rollouts, decided: from a stable deployment to a canary, in steps of traffic, by evidence.

    plan      what an operator asks for: sides, steps, gates, rules
    samples   what is measured of both sides, and in which window
    tables    the route table at each share, and without a side
    capacity  whether replicas are there, are right, and carry a share
    exact     bounds that hold at any size: Clopper-Pearson, DKW, empirical Bernstein
    evidence  both sides made comparable, and bounds on each metric of either
    analysis  verdicts of all gates at one look
    state     where a rollout stands, and what has moved it
    staging, stepping, ending   what each state does at a look
    machine   `advance` and the operator's commands

Pure: no I/O, no clock, no dice. The shell is `control_plane/rollout_*` and `store/rollouts`.
"""
