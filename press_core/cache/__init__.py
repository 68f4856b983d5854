"""Cache layers that have lost tokens."""
