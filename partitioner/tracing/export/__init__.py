"""torch.export with a symbolic batch, and what it leaves out restored."""
