"""Clocks of schedules: the times of actions, and the microbatches in flight."""
