"""The model file: mapped and checked (gguf.py), its number formats decoded (formats.py)."""
