"""The tests; a file tests one concept."""
