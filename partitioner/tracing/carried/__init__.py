"""Python state that a call leaves for the next one, which a graph lacks."""
