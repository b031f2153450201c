"""Checkpoints: full tensors and DTensors, saved from one plan and loaded by another."""
