"""The report of one partition: a page in a single file, which opens in a browser without a network."""
