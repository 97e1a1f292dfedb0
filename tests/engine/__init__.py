"""Processes of an engine: keeper, launcher, ports, health, client."""
