"""Sharding rules: for each op, the loops over axes from which layouts, costs and halos are derived."""
