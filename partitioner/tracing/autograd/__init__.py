"""Effects of autograd outside a graph: custom functions, hooks, and gradients that forward takes."""
