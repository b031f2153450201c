"""A training step on a machine that is not there: the emitted programs, run on a clock."""
