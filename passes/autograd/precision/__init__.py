"""Types in which gradients are added and summed where a model casts."""
