"""The page that shows decoding: what was drafted, accepted and spent, token by token and round by round."""
