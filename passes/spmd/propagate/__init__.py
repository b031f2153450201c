"""Propagate layouts: choose how each call is cut over each mesh dimension, from the axes that the dimension cuts."""
