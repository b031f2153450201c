"""Graphs for other sizes of the inputs: their names, and the tables that the model reads by size."""
