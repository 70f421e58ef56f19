"""The command line: parses what a person or a script asks for, hands it to the engine, and prints what came of it.

Owns exit codes and what is printed where. What a verb does to a run is the engine's. Importing it is light; each verb
loads what it needs.
"""

from perdure.cli.entry import main

__all__ = ["main"]
