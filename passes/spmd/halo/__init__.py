"""Halo exchange for windowed axes: which elements a rank needs, how it gets them, and what overlaps."""
