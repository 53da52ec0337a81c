"""Other systems: servers, harnesses, engines."""
