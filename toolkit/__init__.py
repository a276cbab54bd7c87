"""Predict, choose, launch and verify the memory strategy of a transformer fine-tuning run."""

__version__ = "0.1.0"
