"""What is communicated, how much, and why."""
