"""A small server with the OpenAI API, for one process and a handful of users: `fsd-infer serve`."""
