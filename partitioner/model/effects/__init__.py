"""Give the caller what forward does besides returning its result."""
