"""Tables: a row a device, a module or a difference."""
