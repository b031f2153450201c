"""The report of one partition: one HTML file, which needs no network."""
