"""What is there: memory probes and the leases that keep two engines off one device."""
