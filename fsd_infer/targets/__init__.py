"""The target model: what decoding asks of it, and loading it by a built-in name, a directory or a hub id."""
