"""This release's version, as recorded by the runs it starts and drives."""

VERSION = "0.1.0"
