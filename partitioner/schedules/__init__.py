"""Pipeline schedules: pure functions of ranks, stages and microbatches."""
