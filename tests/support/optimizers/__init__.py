"""Optimizers of partitioned models beside those of models, in one process and in several."""
