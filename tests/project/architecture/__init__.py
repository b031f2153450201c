"""The house rules as tests: each failure names file, line and what to do."""
