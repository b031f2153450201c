"""Collectives and messages: between ranks of one process, and over torch.distributed."""
