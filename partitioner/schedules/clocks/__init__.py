"""Clocks: when the actions of a schedule run, and what is in flight."""
