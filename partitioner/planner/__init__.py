"""From a ``ModelGraph`` and a cluster to a ``Plan``."""
