"""The grader of mathematics: extracts an answer from a response and compares it by its meaning."""
