"""From a call to its trace, and from a plan to the programs of all ranks."""
