"""Inputs of a model: found, flattened, tied, and key-value caches among them."""
