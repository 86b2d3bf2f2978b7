"""Trained weights: fetched once and verified (`fetch`), read from GGUF files (`gguf_file`) and Hugging Face folders
(`hf_folder`), downloaded from the hub (`hub`)."""
