"""Measure what fits a device's memory, boot by boot, as a pytest plugin."""
