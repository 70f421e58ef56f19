"""Values that cross a boundary: immutable, closed, provider-neutral. Imports nothing above itself."""
