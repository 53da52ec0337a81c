"""What was found by measurement."""
