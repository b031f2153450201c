"""Recording of running programs: times of compute and communication."""
