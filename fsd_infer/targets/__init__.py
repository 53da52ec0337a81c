"""Loading targets: built-in ones, directories, hub ids."""
