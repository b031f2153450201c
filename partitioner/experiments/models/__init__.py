"""The models of a sweep or command: factories, configurations of transformers, traced subjects."""
