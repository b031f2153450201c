"""Time and memory of units of a model, by layout and stage."""
