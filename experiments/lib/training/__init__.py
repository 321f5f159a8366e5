"""Modules of the training scripts: rows, heads, checkpoints and reports."""
