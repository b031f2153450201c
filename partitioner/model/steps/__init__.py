"""Steps of a partitioned model: a call and its backward, a training step, a training step inside of a call."""
