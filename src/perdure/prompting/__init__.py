"""From a transcript and an agent's definition to a model request. Pure."""
