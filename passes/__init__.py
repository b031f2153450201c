"""The compiler's phases. They rewrite graphs; they know no costs and no processes.

    ir          the data types that every phase shares: graph, mesh, layout, plan, schedule, program, communication
    graph       facts about fx graphs: schemas, aliasing, symbolic sizes, provenance, repeated subgraphs, printing
    rules       for each op, the loops over axes from which layouts, halos, the way of the batch and costs derive
    normalize   exported graph -> functional, typed, named graph without no-ops
    analysis    graph -> its axes, their names, the rows of its batch, partial sums
    stages      graph -> pipeline stages
    spmd        graph and axes -> layouts -> each rank's local graph, with reshards, halos and decompositions
    autograd    stage -> forward, input-gradient and weight-gradient graphs, with recomputation
    tiling      region -> tiles computed in sequence on one device, forward and backward
    emit        stages and schedule -> each rank's program, with sends, receives and overlapped collectives
    verify      programs -> proof that messages match, groups agree and nothing deadlocks

This is the order of imports: a phase imports no later one (a contract in pyproject.toml). ``pipeline.py`` stands above them and has the
order in which they run for a plan: there a graph is sharded before it is split into stages.
"""
