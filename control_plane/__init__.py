"""The control plane: tenants, keys, the registry, the fleet's reports, and the audit of it all.

It never sits on the token path: when it is away, gateways go on with what they last read.
"""
