"""Which axes are sharded over which mesh dimension."""
