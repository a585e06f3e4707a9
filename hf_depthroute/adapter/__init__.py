"""The PEFT method: injection into a model, and its files, saved, loaded and checked."""
