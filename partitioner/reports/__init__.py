"""Text, tables, pictures and pages about a partitioned model."""
