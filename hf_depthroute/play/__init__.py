"""A page where a routed model and its base write side by side (`hf-depthroute play`)."""
