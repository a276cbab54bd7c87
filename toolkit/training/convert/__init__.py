"""Training state from and to the formats of others, and models out of it.

Whatever wrote it is read into one form (`held.py`): tensors by kind and parameter, each read only when it is written
elsewhere, so that no model lies in memory whole.
"""
