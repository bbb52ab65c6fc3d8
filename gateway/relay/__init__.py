"""One request, from an authenticated conversation to its settlement.

    Relay       the registry: every request under way, and every settlement
    Exchange    one request as a task; the response only reads its channel
    Ticket      its standing with the dispatcher: admitted, placed, let go
    Hold        its money: reserved, topped up, settled
    Generation  its attempts on workers, and what the client has of them

Invariant: every exchange ends in one end cause, is let go of by the dispatcher, and is
settled, whatever becomes of its client.
"""
