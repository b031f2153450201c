"""``PartitionedModel`` and its methods."""
