"""The search over meshes, schedules, microbatches and recomputation."""
