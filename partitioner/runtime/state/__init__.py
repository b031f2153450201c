"""Parameters, buffers, gradients and optimizer state of this process, and how they are gathered, saved and loaded."""
