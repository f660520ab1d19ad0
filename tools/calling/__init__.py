"""The micro-model of tools: it calls the function that a question needs, and tells what came back."""
