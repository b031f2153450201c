"""What a partitioned model says of itself: tables, explanations, their text and HTML."""
