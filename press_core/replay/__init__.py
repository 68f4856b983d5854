"""Presses that run a context again before they judge it."""
