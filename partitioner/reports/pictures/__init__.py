"""Pictures as SVG and dot: a model over its ranks, blocks of weights, charts."""
