"""Optimizers on sharded parameters: their state, and updates that need whole tensors."""
