"""Graphs and what rewrites them: never costs, never processes."""
