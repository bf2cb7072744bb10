r"""Runs programs that a policy wrote, so that they can harm neither the machine nor the verdict.

    with Sandbox("auto") as sandbox:
        outcome = sandbox.run(Program("print(int(input()) + 1)", stdin="6"), Limits())
    assert outcome.stdout == "7\n"

Four processes take part. The client (`client`) is trusted and compares a program's output with the
expected output. It starts a server (`server`), which enters namespaces (`namespaces`) and forks a
watcher for each program. The watcher forks the program (`program`), which gives up all of its
privileges (`landlock`, `seccomp`) before its first line runs. The verdict never comes from the
sandbox: expected outputs stay with the client.

`levels` finds out which protection a machine allows. `remote` runs programs on a remote server
instead. docs/environments.md explains the protection of each level. Nothing here imports jax, and
the modules that run inside of the sandbox import only the standard library.
"""
