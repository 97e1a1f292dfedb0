"""Pages and charts made from records alone."""
