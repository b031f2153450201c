"""Run programs: all ranks in this process, or one rank a process."""
