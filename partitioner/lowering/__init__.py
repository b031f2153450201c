"""From a plan to the programs of all ranks."""
