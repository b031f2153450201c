"""Propagation of layouts."""
