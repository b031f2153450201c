"""Compute how long calls wait for collectives that run beside them: messages, the program of a rank, its waits."""
