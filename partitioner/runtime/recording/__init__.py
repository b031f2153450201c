"""Recording of running programs: times of compute and communication, and tokens of each expert."""
