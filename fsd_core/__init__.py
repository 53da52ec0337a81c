"""What decoding, measuring and training share; it imports none of them."""
