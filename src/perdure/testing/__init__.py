"""The testing kit, for users too: scripted models, a provider's protocol over a real socket."""
