"""What trains: gates and cheap branches, one class each, found in a table by name."""
