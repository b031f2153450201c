"""Rewrite an exported graph into the form that later phases rely on: functional, typed, named, without no-ops."""
