"""Random numbers: drawn in the order of memory, and apart from what they change."""
