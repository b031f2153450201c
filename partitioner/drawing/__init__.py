"""Pictures of a partitioned model: its graph over the ranks, and which rank holds which block of a weight; as dot and as SVG."""
