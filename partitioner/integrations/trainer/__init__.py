"""transformers' Trainer: its checkpoints have the states of all ranks."""
