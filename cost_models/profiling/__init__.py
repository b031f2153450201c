"""Cost models from timed ops."""
