"""Cases of `launch/bench.py`: each compares contenders inside one process, in interleaved rounds."""
