"""Runs programs that a policy wrote, so that they can harm neither the machine nor the verdict.

    with Sandbox("auto") as sandbox:
        outcome = sandbox.run(Program("print(int(input()) + 1)", stdin="6"), Limits())
    assert outcome.stdout == "7\\n"

Four processes take part. The client (`client`) is trusted and compares what a program printed with
what it should have printed. It starts a server (`server`), which shuts itself in (`namespaces`) and
forks a watcher for each program. The watcher forks the program (`program`), which gives up every
right (`landlock`, `seccomp`) before its first line runs. The verdict never comes from the sandbox:
expected outputs stay with the client.

`levels` finds out which protection a machine allows. `remote` runs programs on a server elsewhere
instead. docs/sandbox.md says what each level protects against. Nothing here imports jax, and the
modules that run inside of the sandbox import the standard library alone.
"""
