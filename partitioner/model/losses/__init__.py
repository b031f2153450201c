"""Loss functions: what they are over the rows of a batch, proved or refused."""
