"""How many replicas a deployment should have: pure decisions, each with its reasons."""
