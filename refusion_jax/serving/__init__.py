"""Serving: an OpenAI-compatible HTTP server on the running batch of `decoding/`."""
