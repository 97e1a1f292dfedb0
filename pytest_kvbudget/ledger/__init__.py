"""From a boot log to what it says about memory: reader, grammar tables, ledger, diagnosis. Pure, no I/O."""
