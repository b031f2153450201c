"""Verify programs: valid graphs, matching messages, the same collectives in every group, no deadlock."""
