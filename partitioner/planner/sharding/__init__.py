"""Choice of the axes sharded over each mesh dimension."""
