"""``PartitionedModel`` and what its methods do."""
