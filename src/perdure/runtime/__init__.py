"""What a loop may use: one context, written over ports. Owns dispatch, limits, waits; knows no store and no
provider."""
