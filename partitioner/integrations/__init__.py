"""Integrations with other parts of PyTorch and with other libraries; each is imported when it is used, not before."""
