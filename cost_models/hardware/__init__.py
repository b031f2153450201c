"""Devices, links and clusters: presets, or measured on this machine."""
