"""What every operation does to axes: the rules from which propagation, layouts, costs and halos derive."""
