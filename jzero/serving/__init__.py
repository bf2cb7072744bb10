"""A model behind a network interface: OpenAI's HTTP API, or JetStream's gRPC API.

`requests.py` validates the body of a request and makes sequences of it, `worker.py` decodes the
sequences of all requests together, `choices.py` writes what a client gets to see of a sequence, and
`http.py` connects the three. `jetstream.py` gives the engine to JetStream's own server instead.
"""
