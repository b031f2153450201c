"""Cost models of a machine that is at hand: operations timed, and rates fitted to their times."""
