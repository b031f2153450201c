"""Tests of the memory of a step."""
