"""Results of a sweep: rows, the store, plots and the report."""
