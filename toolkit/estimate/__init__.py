"""Memory and time of one plan: trace, lower, replay."""
