"""Times of collectives and point-to-point messages.

algorithms    the time on a cluster: the fastest algorithm on the links between the group's ranks
alpha_beta    the formula of each collective and algorithm, in bytes, group size, latency and bandwidth
"""
