"""Compute a model tile by tile, in turn on one device, so that what is large is never whole."""
