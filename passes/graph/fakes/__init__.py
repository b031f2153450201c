"""Fake tensors: calls on them, run once for equal calls."""
