"""A file of prompts in, a file of answers out, at the highest throughput the hardware allows.

    python scripts/offline_infer.py --input examples/prompts.jsonl
    python scripts/offline_infer.py --mesh 2x4 --input prompts.jsonl --output answers.jsonl

Every non-blank input line gives one output line. Exit status: 0 all rows completed, 1 the run broke
off, 2 wrong usage, 3 some rows failed, 4 interrupted.
"""

from blendjax.cli import run

if __name__ == "__main__":
    run()
