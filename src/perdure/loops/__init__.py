"""Loops written over `RunContext` alone, as a user's own would be."""
