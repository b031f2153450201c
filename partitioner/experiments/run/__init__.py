"""Run a sweep: placements, evaluations, worker processes, measurements."""
