"""The gateway: tenants' REST API. Authenticates, routes, admits, reserves, streams, settles.

Pure here: `conversation`, `fields`, `sse`, `retry`, `openai`, `anthropic`, `routing`. The rest
is the shell around them.
"""
