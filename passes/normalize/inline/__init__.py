"""Inline what a graph calls as a function: subgraphs, and regions under ``vmap``."""
