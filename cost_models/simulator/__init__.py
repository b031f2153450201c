"""A discrete-event simulation of emitted programs on a cluster."""
