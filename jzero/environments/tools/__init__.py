"""Tools that a policy may call in an episode: schemas, parsing of calls, and execution.

    schemas     a Python function with types and a docstring -> the JSON schema in the prompt
    parsing     a response -> its tool calls, in the two syntaxes of Qwen's models
    toolbox     `task.tools.names` -> the tools of one episode
    calling     calls -> the messages that answer them, within the limits of `task.tools`
    episodes    an environment that answers calls, around a task or a user-defined environment

`calculator`, `interpreter` and `search` are the built-in tools. Imports no jax: grader processes
load these modules. Tools run in grader processes, so that a slow tool does not delay decoding.
"""
