"""Resumable rollouts of configurations, and timing of compiled calls."""
