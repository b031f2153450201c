"""torch.export with a symbolic batch, and the facts that it leaves out."""
