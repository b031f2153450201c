"""``pm.generate()``: decoding with a cache of keys and values that is laid out as the attention is."""
