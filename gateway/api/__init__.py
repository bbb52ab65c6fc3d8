"""The HTTP edge: bodies in, answers out, in the dialect of the path. Nothing is decided here."""
