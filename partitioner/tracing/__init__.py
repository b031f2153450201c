"""From an ``nn.Module`` to a ``ModelGraph``."""
