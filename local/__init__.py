"""The whole system on one machine: embedded services, a supervisor, a seed.

Processes are started with `python -m`, never imported.
"""
