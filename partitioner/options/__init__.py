"""What a caller may say: the options of ``partition`` and of its relatives, and the checks of their values."""
