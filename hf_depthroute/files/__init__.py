"""What is read, written, printed and fetched: staged writes, escaped text, the Hub, bounds. Nothing of routing."""
