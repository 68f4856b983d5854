"""Cache layers that have lost tokens, reading them, and storing what a press has left."""
