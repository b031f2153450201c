"""No call writes memory: what it wrote is a new value, of the tensor and of its views."""
