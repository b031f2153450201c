"""Communication: its ops as graph nodes, what each yields, index ranges of blocks, halo strategies, backends."""
