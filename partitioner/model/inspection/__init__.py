"""Plan, programs, predictions and reports of a partitioned model."""
