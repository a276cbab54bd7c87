"""Training state in one format, whatever the engine.

A tensor of the state belongs to a parameter (its name) and is of a kind: the weights themselves, or what the
optimizer keeps for them (exp_avg, exp_avg_sq, step, ...). Every engine holds a contiguous part of the flattened
tensor on each rank: the whole (single, ddp), a range of rows (fsdp), a stretch of a flat partition (ZeRO). So a file
holds pieces, each with the position of its first element, and a rank of any other engine reads the positions that it
needs from whichever files have them.
"""
