"""Mixed precision as ``torch.autocast`` has it, written as operations."""
