"""Run the original and the partitioned model side by side, and find the first value that differs."""
