"""The arithmetic of the engine, one operation at a time.

`reference` is the specification, in plain torch and readable; `cpu` is what runs on a
processor. Kernels know tensors and shapes: no models, no requests, no settings.
"""
