"""Facts about fx graphs that every phase reads: schemas, aliasing, sizes, provenance, dependencies, printing."""
