"""The shapes of draft trees, the likeliest nodes, and the policy that chooses a tree in every round."""
