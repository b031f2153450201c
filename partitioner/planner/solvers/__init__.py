"""Solvers: numbers in, numbers out, exact against brute force."""
