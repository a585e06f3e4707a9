"""The trainable parts: gates and cheap branches, one class each, found in a table by name."""
