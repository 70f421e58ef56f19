"""Complete examples that ship with the package."""
