"""Random numbers: drawn in the order of memory, by nodes apart from the calls that apply them."""
