"""Plots: colors, panels and learning curves."""
