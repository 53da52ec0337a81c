"""Training of draft heads and small draft models for fsd_infer."""
