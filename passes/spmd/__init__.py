"""Shard a graph over a mesh: propagate layouts, insert reshards and halo exchanges, write each rank's local graph."""
