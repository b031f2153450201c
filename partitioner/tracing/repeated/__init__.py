"""Repeated blocks: traced once, replayed for each copy."""
