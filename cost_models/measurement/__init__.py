"""What this machine reaches: its devices and the links between them, measured."""
