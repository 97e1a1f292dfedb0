"""Simulated devices of the search benchmarks: physics of their own, in process, as an engine's log would show them."""
