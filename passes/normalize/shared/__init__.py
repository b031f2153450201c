"""One name for each tensor, and one call for each value."""
