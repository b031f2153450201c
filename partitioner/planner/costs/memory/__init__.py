"""Compute the memory of a step: what is stored, saved for the backward, recomputed, and alive within each unit."""
