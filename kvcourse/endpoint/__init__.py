"""Measuring a server from outside: what a user of an OpenAI-compatible streaming endpoint waits for, and how long."""
