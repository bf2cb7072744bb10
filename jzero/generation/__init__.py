"""The parts of `python -m jzero.generate`.

`rows` makes rows and maintains their file, `servers` sends requests to one server, `sharing`
distributes the problems over all servers, and `progress` prints the rate and the remaining time.
"""
