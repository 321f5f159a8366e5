"""Compiled XLA programs and their memory traffic."""
