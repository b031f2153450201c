"""What forward does besides returning its result."""
