"""How a new version takes over a public name: pure decisions on steps, samples and verdicts."""
