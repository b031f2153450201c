"""Effects of forward besides its result."""
