"""Cut points of pipelines, and costs of candidates of stages, schedule and microbatches."""
