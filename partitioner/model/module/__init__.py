"""A partitioned model as an ``nn.Module``: its structure, attributes, modes and copies."""
