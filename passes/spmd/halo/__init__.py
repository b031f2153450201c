"""Halo exchange for windowed axes (convolution, pooling): which elements a rank needs, and how it gets them.

boxes, call_tiles, demand    the tiles of a value, and the elements that a call reads of its operands; sequential tiling uses them too
regions                      the halo of each call, as index ranges by rank
wide, overlap                two strategies: one wide halo for several layers; compute the interior while the halo is exchanged
emit                         write the exchanges into the rank's graph
"""
