"""A model behind a network interface: OpenAI's HTTP API, or JetStream's gRPC API.

`requests.py` validates the body of a request and makes sequences of it, `worker.py` decodes the
sequences of all requests together, `choices.py` writes what a client gets to see of a sequence,
`replies.py` sends that, and `http.py` connects the four. `limits.py` has the bounds of all of them.

`sockets.py` takes the port, `connections.py` closes connections that are of no use, `keys.py`
checks the API key, and `ending.py` lets requests finish when the server is stopped. `jetstream.py`
gives the engine to JetStream's own server instead.
"""
