"""Fake tensors: running calls on them, once for equal calls, and results that are plain to see."""
