"""Reading of prompts, chat conversations, and streamed output."""
