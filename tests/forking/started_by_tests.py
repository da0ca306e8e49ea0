"""The first work of processes that tests start; imported by their sitecustomize."""

import os

# A test may want a server exactly as users start it.
if "TESTS_SPAWN" not in os.environ:
    import fork_instead_of_spawn  # noqa: F401

    if "TESTS_FORK_SERVERS" in os.environ:
        import forked_commands

        forked_commands.take_over()
if os.environ.get("TRITON_INTERPRET") == "1":
    import faster_interpreter

    faster_interpreter.when_imported()
# The coverage of all processes may be measured: `make test COVERAGE=1`.
if "COVERAGE_PROCESS_START" in os.environ:
    import periodic_coverage  # noqa: F401
