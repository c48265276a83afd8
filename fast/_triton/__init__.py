"""What every kernel shares: launch checks, op registration, device facts, tuning tables."""
