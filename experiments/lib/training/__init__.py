"""Modules of the training scripts: rows, heads, saves and reports."""
