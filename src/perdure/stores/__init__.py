"""Where journals are kept. `perdure.stores.url.open_store` opens one by its URL."""
