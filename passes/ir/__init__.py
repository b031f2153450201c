"""Data types that every phase shares: graph, mesh, layout, plan, schedule, program, errors."""
