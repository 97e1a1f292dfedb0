"""The simulated engine: a real process on a simulated device."""
