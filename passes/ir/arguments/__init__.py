"""Arguments of public calls, and fields of public dataclasses, checked against their annotations."""
