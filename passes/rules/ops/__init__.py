"""Rules of ops whose loops depend on their arguments: functions instead of lines of the rule language."""
