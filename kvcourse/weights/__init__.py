"""Trained weights: fetched once and verified (`fetch`), read from GGUF files (`gguf_file`)."""
