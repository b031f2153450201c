"""The options of ``partition`` and of its relatives: their types, checks and meanings."""
