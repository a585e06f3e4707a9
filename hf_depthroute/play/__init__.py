"""A page to play with: a routed model and its base write side by side (`hf-depthroute play`;
needs Gradio)."""
