"""Tokenizers and chat templates, read from Hugging Face files or from GGUF metadata.

Gateway and worker share it: both must turn the same bytes into the same ids. No torch, no
network, no settings; the one thing to hold is `rules.TextRules`, one for each model version.
"""
