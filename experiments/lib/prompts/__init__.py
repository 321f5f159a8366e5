"""Prompts of the scripts, and their output as it is generated."""
