"""A routed model inside vLLM: an architecture on its Transformers backend,
whose layers skip the FFNs of easy tokens.

vLLM finds it by the entry point of `hf_depthroute_vllm`, and imports `model` when it builds one.
Nothing here imports vLLM before.
"""
