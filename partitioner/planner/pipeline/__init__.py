"""Where a pipeline may be cut, and what a candidate of stages, schedule and microbatches costs."""
