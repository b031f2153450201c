"""Read facts from a normalized graph: its axes and their names, and how rows of the batch pass through it."""
