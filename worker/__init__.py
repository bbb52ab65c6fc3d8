"""The engine process: one model version on one accelerator group.

Pure decisions (`sequence`, `blocks`, `scheduler`, `detokenize`), plain data between them and
the arithmetic (`step`), and shells around both. Nothing here touches Postgres or Valkey.
"""
