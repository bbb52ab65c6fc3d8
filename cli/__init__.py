"""`headworks`: the operator's and tenant's command. Each subcommand is a module."""
