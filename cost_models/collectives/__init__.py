"""Times of collectives and point-to-point messages."""
