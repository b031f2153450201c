"""Lower bounds of step times, by which a search discards candidates."""
