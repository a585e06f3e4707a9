"""The adapter's configuration and its rules."""
