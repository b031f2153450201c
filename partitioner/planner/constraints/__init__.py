"""Constraints of the user as conditions on axes, stages and halos."""
