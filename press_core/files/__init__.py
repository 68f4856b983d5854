"""Compressed caches on disk."""
