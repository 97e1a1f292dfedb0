"""One module per way to start and watch an engine."""
