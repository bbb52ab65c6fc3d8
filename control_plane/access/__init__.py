"""Who an operator is and what they may do."""
