"""Which shape to boot next, and what the boots so far prove. Pure, no I/O."""
