"""Presses that replay a context before they prune it."""
