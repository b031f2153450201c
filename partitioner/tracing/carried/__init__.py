"""What a call of a model leaves in Python for the next one, which a graph does not have."""
