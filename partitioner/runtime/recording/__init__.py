"""What programs show while they run: when a rank computes and communicates, and how many tokens each expert has."""
