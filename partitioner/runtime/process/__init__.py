"""One rank a process: groups, agreement between ranks, failures."""
