"""Split a graph into pipeline stages."""
