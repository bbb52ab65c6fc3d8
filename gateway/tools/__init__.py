"""Tool calls in what a model writes: found as the text comes, and forced when asked for. Pure."""
