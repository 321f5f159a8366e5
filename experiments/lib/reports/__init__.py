"""Figures and tables of the studies, from their runs."""
