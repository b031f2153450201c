"""Values whose rows are computed each by itself: rows in the order of a sort, and rows of the experts that tokens chose."""
