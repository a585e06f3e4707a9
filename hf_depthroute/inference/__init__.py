"""After training: thresholds for a budget, fitted branches, importance,
drafts and tuned execution."""
