"""Reports of communication: values, bytes and reasons."""
