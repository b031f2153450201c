"""Layouts of calls that commute with collectives: computed on the other side of one, where less is sent."""
