"""A small serving engine: pages for keys and values, reuse of prefixes, a scheduler, and the engine that runs them."""
