"""Text and tokens: tokenizer, chat template, detokenizer. Built from a model file's metadata; knows no weights and no network."""
