"""The sections of ``pm.explain()``."""
