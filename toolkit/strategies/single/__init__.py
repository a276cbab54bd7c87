"""One process, no engine."""
