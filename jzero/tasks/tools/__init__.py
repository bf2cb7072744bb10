"""Tools that a policy may call in an episode: their schemas, how calls are read, and the calls.

    schemas     a Python function with types and a docstring -> the JSON schema that a prompt shows
    parsing     a response -> the calls in it, in the two syntaxes of Qwen's models
    toolbox     `task.tools.names` -> the tools of one episode
    calling     calls -> the messages that answer them, within the limits of `task.tools`
    episodes    an environment that answers calls, around a task or an environment of the user's

`calculator`, `interpreter` and `search` are the tools that jzero has. Imports no jax: grader
processes load these modules, and tools run there, so that a slow tool holds up no decoding.
"""
