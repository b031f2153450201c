"""Step time, memory and bytes moved as sympy expressions."""
