"""Decompositions of ops that reduce over a sharded axis into local ops and collectives."""
