"""HTTP servers with bounds: the layer below `jzero serve`, the Tinker API, the store and `watch`.

    sockets.py       binds ports, and raises the limit of open files
    limits.py        limits on connections, as flags
    connections.py   the connections of a server: deadlines, numbers, and who makes room
    rules.py         the Host, Origin, type and form that a request must have
    bodies.py        bodies of requests, received on disk within one budget
    running.py       runs a server, and ends it in a bounded time

An application of Starlette is served by `BoundedConfig(app, limits, rules)` and `BoundedServer`, or
by `HttpServer`, which binds the address as well.
"""
