"""A method as a service: an OpenAI-compatible server over the decode loop."""
