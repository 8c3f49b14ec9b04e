"""Ask before the run: does it fit, how fast, with which JSON. Also installed as `hmt-plan`.

python launch/plan.py --model 7b --machine rtx4090 --seq_length 4096 --micro_batch 4
"""

from hmt_deepspeed.planner.command import main

if __name__ == "__main__":
    main()
