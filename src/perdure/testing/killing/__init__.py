"""Runs killed in real processes: what a process was doing when it died, how it is killed, and what came of its run.

`campaign` kills a run of ours thousands of times; `crash_test` kills a user's agent at every boundary. Both stand on
`marks` (what a process does, seen from outside it), `marking` (wrappers that keep the marks) and `processes` (forked
processes of which nothing is left behind).
"""
