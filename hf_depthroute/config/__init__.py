"""What a user may ask for, and which wishes exclude each other."""
