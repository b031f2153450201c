"""The words that every layer shares: errors, graphs, schedules, plans, communication, programs."""
