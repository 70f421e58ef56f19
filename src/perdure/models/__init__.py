"""Adapters from a provider's protocol to `ModelClient`: one module per protocol, heavy imports on first use."""
