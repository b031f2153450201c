"""A zoo of small models, one file a family: what every partition must leave unchanged."""
