"""Read conversations and prompts from data files, and encode them as token ids."""
