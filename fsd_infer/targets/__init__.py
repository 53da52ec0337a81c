"""The target model: loading it by a built-in name, a directory or a hub id, and the operations decoding needs."""
