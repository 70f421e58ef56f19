"""Tools: functions offered to a model, their schemas, the check of what a model sends, and output models."""
