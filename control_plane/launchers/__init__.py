"""Who starts and stops the processes that serve: one contract, several places."""
