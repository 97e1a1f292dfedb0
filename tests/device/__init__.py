"""Leases and memory probes."""
