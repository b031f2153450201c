"""FLOPs, bytes and times of ops."""
