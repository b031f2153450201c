"""accelerate: its processes are replicas of a partitioned model, and its checkpoints have the states of all ranks."""
