"""Custom autograd functions: operators that stand for them, and their rules."""
