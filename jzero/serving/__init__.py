"""Serves a model over the network: OpenAI's HTTP API, or JetStream's gRPC API.

`requests.py` validates the body of a request and turns it into sequences, `worker.py` decodes the
sequences of all requests together, `choices.py` converts sequences to OpenAI's choices,
`replies.py` sends the choices, and `http.py` connects the four. `limits.py` defines their limits.
`tools.py` reads the tools of a chat, and the calls in an answer.

`keys.py` checks the API key, and `ending.py` ends requests when the server stops. Connections, the
port and bodies are bounded by `jzero.servers`. `jetstream.py` runs the engine under JetStream's
server instead.
"""
