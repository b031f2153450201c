"""Sequential tiling: compute a region tile by tile on one device, forward and backward, to cut peak memory."""
