"""Degrees that cut across a strategy: tensor, context and sequence parallelism."""
