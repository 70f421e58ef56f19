"""An agent that recovers a failed job, with everything it needs on this machine: service, runbook, stand-in model.

The pieces know each other only over HTTP and files. The model's stand-in in particular imports nothing of the service.
"""
