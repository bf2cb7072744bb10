"""The trainer and the samplers of a run as separate jobs, which share files and nothing else.

    store.py      files in a directory or a bucket: atomic writes, exclusive creation, one clock
    snapshots.py  the weights of each policy version, by content hash: full, or as differences
    requests.py   requests for rollouts, and their results: identity, bytes, validation
    sealed.py     files in MessagePack with a checksum, bounded before they are parsed
    checks.py     the bounds of what samplers write: tokens, turns, grades, counters
    regrading.py  the grades that the trainer, or a replay, compares with those of samplers
    progress.py   the sequences of a request, and how one sampler hands them to another
    leases.py     which sampler works on which request, with a deadline
    stream.py     the trainer's side: publishes snapshots and requests, collects rollouts

`python -m jzero.sample` is the sampler. docs/clusters.md is the user guide.

A rollout is a function of the weights, the request and the seed, so a sampler may be lost at any
time: another one gives the same answer. All files of a store:

    run.json                    the run and its settings, written by the trainer
    trainer                     the process that trains: an earlier one ends when it reads another
    decoder.json                with schedule=fixed: the hardware and software of all samplers
    snapshots/<version>.json    a manifest; its tensors are snapshots/<version>-<number>-<hash>
    snapshots/newest            the newest version
    requests/<id>               an open request
    leases/<id>                 its sampler; the time of the last change is the sign of life
    partials/<id>               its sequences so far, of a sampler that was told to stop
    results/<id>-<digest>       its rollouts, until the trainer takes them
    refused/<sampler>           a sampler whose result failed validation, and why
    broken/<version>            a snapshot that a sampler could not read, and why
    clock/<name>                files that exist only to read the store's clock
    end                         the run has all of its rollouts: samplers end
"""
