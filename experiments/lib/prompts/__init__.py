"""Prompts of the scripts, chat, and streamed output."""
