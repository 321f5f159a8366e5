"""What SmolLM2 is asked in smollm2_test.py: 2 texts and 3 conversations."""

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n  \"\"\"The n-th number, for n up to 30.\"\"\"\n",
)
CONVERSATIONS = (
    [{"role": "user", "content": "What is 127 + 385?"}],
    [{"role": "system", "content": "You answer in one sentence."},
     {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Name three colours."},
     {"role": "assistant", "content": "Red, green and blue."},
     {"role": "user", "content": "And three more, à la carte?"}],
)
