"""Memory of tensors over their lifetimes, and of optimizer state."""
