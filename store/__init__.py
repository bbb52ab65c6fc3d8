"""Postgres and Redis: the only package that holds their drivers. Async only.

Functions take a connection and never commit; `store.postgres` alone opens transactions.
"""
