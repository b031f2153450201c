"""Numbers about graphs: hardware, operations, collectives, memory. Rewrites nothing, runs no processes."""
