"""Model files: fetched, checked, kept under their own hash.

`pull.pull` brings a model into a `store.ModelStore`; workers and gateways read it from there
by version. No tokenizing and no tensors: what is inside the files is for `text` and `worker`.
"""
