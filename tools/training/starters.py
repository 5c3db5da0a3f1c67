"""What dialogues begin with: the first words of a user's message, and whole messages kept for measuring."""

from __future__ import annotations

from training.errors import TrainingError

STARTERS = (
    "Write a Python function that", "Write a short story about", "Write a poem about", "Explain how",
    "Explain why", "Explain the difference between", "What is the difference between", "How do I",
    "How can I", "How does", "How many", "How would you", "What are the", "What is", "What happens if",
    "What would happen if", "Why do", "Why is", "When did", "Who was", "Where can I", "Which",
    "Solve this problem step by step:", "A farmer has", "A shop sells", "A car drives", "If x + y =",
    "Compute", "Prove that", "Find all", "Simplify", "Sum up this text:", "Summarise the following:",
    "Translate into French:", "Correct this sentence:", "Rewrite this in a formal tone:", "List five",
    "List three reasons", "Name some", "Give me a recipe for", "Give an example of", "Give me advice on",
    "Write an email that", "Write a letter to", "Draft a speech about", "Fix this code:",
    "What does this code do?", "```python\n", "```c\n", "Write a SQL query that", "Write a shell script that",
    "Write a JavaScript function that", "Write unit tests for", "Write a class that", "Make a table of",
    "Return JSON that", "Plan a week of", "Plan a trip to", "Suggest a name for", "Describe", "Tell me about",
    "Tell me a joke about", "Define", "Compare", "Can you help me", "I need help with", "I am learning",
    "My friend", "Imagine that", "Pretend to be", "In one sentence,", "Is it true that", "Should I",
    "Do you think", "Continue this story:", "Complete this sentence:", "Hello", "Hi, I",
)  # fmt: skip
"""A dialogue starts with one of these, or with nothing, and the target goes on in the user's place."""

MEASURED = (
    "How do bees find their way back to the hive?",
    "Write a Python function that returns the second largest number of a list.",
    "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive? Explain each step.",
    "Give me three ideas for a rainy weekend with children.",
    "Explain to a beginner what a database index is.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What is the difference between weather and climate?",
    "List the planets of the solar system with one fact about each.",
    "A box holds 12 rows of 8 eggs. 15 eggs are broken. How many are whole?",
    "Write a polite email that asks for a meeting to be moved to Friday.",
    "How can I learn to play the guitar without a teacher?",
    "Write a JavaScript function that checks whether a word reads the same backwards.",
    "Why is the sky blue and the sunset red?",
    "Give me a simple recipe for tomato soup.",
    "What should I think about before I adopt a dog?",
    "Summarise how a bill becomes a law in the United States.",
)
"""Held out: no dialogue that is trained on starts with these."""


def read_prompts(text: str) -> list[str]:
    """One prompt a line, empty lines left out. Raises `TrainingError` when there is none."""
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise TrainingError("The file of prompts is empty; give one prompt a line.", usage=True)
    return prompts
