"""The journal as data: events, their chain, the fold to a state, the cursor that replays. No clock, no IO."""
