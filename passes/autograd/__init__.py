"""Differentiate stages: forward, input-gradient and weight-gradient graphs, and recomputation."""
