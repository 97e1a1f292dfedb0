"""Pre-boot arithmetic: what a policy will give a shape, as named terms that sum. Pure; proposes, never answers."""
