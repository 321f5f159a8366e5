"""Resumable rollouts of configurations, and timing of programs."""
