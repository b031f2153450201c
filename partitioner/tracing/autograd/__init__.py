"""What PyTorch's autograd would do beside a graph: custom functions, hooks, and gradients that forward takes."""
