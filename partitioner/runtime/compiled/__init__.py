"""The calls of partitioned models in code that ``torch.compile`` makes."""
